"""Bytes of a parameter in real checkpoints are those that `hbp check` predicts."""

import pytest

from megatron_hbp.check.sizes import checkpoint_sizes
from tests.distributed import flags, handmade
from tests.distributed.documents import packs_of_lengths, save_plan

RANKS, BUDGET = 2, 32
# two layers of width 64, an embedding and an output layer of 8192 rows, an RMSNorm at the end
LAYER = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
PARAMETERS = 2 * LAYER + 2 * 8192 * 64 + 64
RUNS = {
    "fp32": ([], {}),
    "fp32, distributed optimizer": (
        ["--use-distributed-optimizer"],
        {"use_distributed_optimizer": True},
    ),
    "bf16, distributed optimizer": (
        ["--bf16", "--use-distributed-optimizer"],
        {"bf16": True, "use_distributed_optimizer": True},
    ),
    "bf16, weights only": (["--bf16", "--no-save-optim"], {"bf16": True, "no_save_optim": True}),
}


@pytest.mark.parametrize("name", RUNS)
def test_bytes_on_disk(cluster, tmp_path, name):
    """Files are larger by the state of the random numbers and by the names of the tensors."""
    more, arguments = RUNS[name]
    lens, packs = packs_of_lengths([[20, 10], [30]])
    corpus = handmade.random_corpus(tmp_path / "corpus", lens)
    save_plan(
        tmp_path / "plan", corpus, packs, [1], budget=BUDGET, num_ranks=RANKS, num_microbatches=1
    )
    argv = [
        *flags.COMMON,
        *flags.SIZE,
        *["--num-layers", "2", "--group-query-attention", "--num-query-groups", "2"],
        *[
            "--vocab-size",
            8191,
            "--seq-length",
            BUDGET,
            "--global-batch-size",
            RANKS,
            "--train-iters",
            1,
        ],
        *["--hbp-plan", tmp_path / "plan", "--save", tmp_path / "saved", "--save-interval", 1],
        *more,
    ]
    cluster.run(RANKS, "tests.distributed.jobs_recorded:train", argv=[str(word) for word in argv])
    sizes = checkpoint_sizes(
        arguments | {"optimizer": "adam", "save": "saved", "save_interval": 1},
        parameters=PARAMETERS,
        gpus=RANKS,
        first=0,
        last=1,
    )
    assert sizes is not None
    folders = list((tmp_path / "saved").glob("iter_*"))
    assert len(folders) == sizes.kept
    data = list(folders[0].glob("*.distcp"))
    assert len(data) <= sizes.files_each
    found = sum(path.stat().st_size for path in data)
    assert sizes.bytes_each <= found <= sizes.bytes_each + 200_000
    assert PARAMETERS > 200_000  # less than a byte a parameter
