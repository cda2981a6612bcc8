"""Fixtures of jobs that share runs: a reference is run once for all tests that need it."""

from pathlib import Path

import pytest

from tests.distributed import flags
from tests.distributed.layouts import RATE_ZERO, Bench, Layout


@pytest.fixture(scope="session")
def bench(cluster, tmp_path_factory) -> Bench:
    return Bench(cluster, tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="session")
def start(bench) -> list[str]:
    """Flags that load one `torch_dist` checkpoint of MLA + MoE under any layout and --seq-length.

    Initial weights depend on TP, PP, EP and --seq-length; a loaded checkpoint does not.
    """
    folder: Path = bench.folder / "start"
    model = [*flags.MLA, *flags.moe()]
    bench.run(
        Layout(1, num_microbatches=1),
        "1",
        [
            *model,
            *RATE_ZERO,
            "--save",
            str(folder),
            "--save-interval",
            "1",
            "--ckpt-format",
            "torch_dist",
        ],
        num_steps=1,
    )
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "1"
    return (
        f"--load {folder} --ckpt-format torch_dist --finetune --no-load-optim --no-load-rng".split()
    )
