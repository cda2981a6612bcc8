"""A run that stops and goes on equals the run that never stopped, bit for bit."""

import numpy as np
import pytest
import torch

from megatron_hbp.plan import Plan
from tests.distributed import flags, handmade

BUDGET, RANKS, MICROBATCHES = 32, 4, 2
STOP = 4  # inside the second of two epochs of three steps


DISTRIBUTED = ["--use-distributed-optimizer"]
OPTIMIZERS = {
    # in the host's default format a distributed optimizer of float32 parameters cannot be loaded
    # (an in-place copy into a view of a leaf that needs a gradient)
    "distributed": [*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable"],
    "distributed-bf16": [*DISTRIBUTED, "--bf16"],
    "plain": [],
}


@pytest.mark.parametrize(
    "optimizer",
    ["distributed", *(pytest.param(n, marks=pytest.mark.slow) for n in list(OPTIMIZERS)[1:])],
)
def test_br_j14_resume_is_bit_equal_and_epochs_end_the_schedule(cluster, tmp_path, optimizer):
    """MLA and MoE, EP 2, CP switched, `torch_dist` checkpoint, planned at start-up with
    --hbp-epochs 2 and no --train-iters: the learning rate ends at --min-lr.
    """
    lens = [120, 90, 60, 45, 50, 33, *[3 + (11 * i) % 29 for i in range(20)]]
    handmade.random_corpus(tmp_path / "corpus", lens)
    argv = [
        *flags.COMMON,
        *flags.SIZE,
        *flags.MLA,
        *flags.moe("aux_loss"),
        *["--expert-model-parallel-size", "2", *OPTIMIZERS[optimizer]],
        *["--seq-length", str(BUDGET), "--global-batch-size", str(RANKS * MICROBATCHES)],
        *["--lr-decay-style", "cosine", "--min-lr", "1e-4"],
        *["--hbp-corpus", str(tmp_path / "corpus"), "--hbp-epochs", "2"],
        *["--hbp-level", "32:1", "--hbp-level", "64:2", "--hbp-level", "128:4"],
    ]
    checkpoint = str(tmp_path / "checkpoint")

    def run(*more: str):
        return cluster.run(RANKS, "tests.distributed.jobs_recorded:train", argv=[*argv, *more])

    unbroken = run()
    stopped = run("--save", checkpoint, "--save-interval", "100", "--exit-interval", str(STOP))
    resumed = run("--load", checkpoint)

    (document,) = (tmp_path / "corpus" / "plans").glob("*/plan.json")  # all three used one plan
    plan = Plan.load(document.parent)
    assert plan.epochs == 2
    steps = plan.num_steps
    assert steps > STOP > steps // 2
    assert len(set(plan.microbatch_level[STOP * MICROBATCHES :].tolist())) > 1

    for rank in range(RANKS):
        whole, first, second = unbroken[rank], stopped[rank], resumed[rank]
        for field in ("losses", "gradient_norms", "learning_rates"):
            assert len(whole[field]) == steps
            assert first[field] == whole[field][:STOP]
            assert second[field] == whole[field][STOP:]
        for name, weight in whole["weights"].items():
            assert torch.equal(second["weights"][name], weight), name
    rates = unbroken[0]["learning_rates"]
    assert rates[-1] == 1e-4
    assert (np.diff(rates) < 0).all()
    assert min(rates[:-1]) > 1e-4
