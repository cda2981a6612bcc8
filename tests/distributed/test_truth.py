"""Packed training with the CP size switched equals each document trained alone, unpacked.

The other side is the stock host model: one process, no packing, no CP, plain masked attention, one
document per forward pass, gradients summed by autograd, torch's AdamW (see jobs_stock.py). Proved:
token losses and every parameter's gradient at step 1, then loss and gradient norm of four optimizer
steps, to 1e-5 of the largest entry.
"""

import numpy as np
import pytest

from tests.distributed import flags, handmade
from tests.distributed.documents import (
    as_json,
    ave_token,
    by_document,
    packs_of_lengths,
    random_packs,
    relative_difference,
    save_plan,
    worst_gradient,
)

BUDGET, RANKS, STEPS = 32, 4, 4
CP_SIZES = [1, 2, 4] * STEPS  # every step has a micro-batch of each
TOLERANCE = 1e-5

MODELS = {"mla-moe": [*flags.MLA, *flags.moe()], "gqa-dense": flags.GQA}


@pytest.mark.parametrize("model", MODELS)
def test_packed_equals_each_document_alone(cluster, tmp_path, model):
    lens, packs = packs_of_lengths(random_packs(CP_SIZES, budget=BUDGET, num_ranks=RANKS, seed=1))
    corpus = handmade.random_corpus(tmp_path / "corpus", lens)
    plan = save_plan(
        tmp_path / "plan",
        corpus,
        packs,
        CP_SIZES,
        budget=BUDGET,
        num_ranks=RANKS,
        num_microbatches=3,
    )
    assert _documents_over_ranks(plan) > 10
    argv = [
        *flags.COMMON,
        *flags.SIZE,
        *MODELS[model],
        "--seq-length",
        str(BUDGET),
        "--global-batch-size",
        str(RANKS * 3),
        "--lr-decay-style",
        "constant",
    ]
    truth = cluster.run(
        1,
        "tests.distributed.jobs_stock:train",
        argv=[*argv, "--train-iters", "1"],
        corpus=str(tmp_path / "corpus"),
        steps=as_json([ave_token(corpus, plan, step) for step in range(STEPS)]),
        weights_out=str(tmp_path / "weights.pt"),
        learning_rate=1e-3,
    )[0]
    ours = cluster.run(
        RANKS,
        "tests.distributed.jobs_recorded:train",
        argv=[*argv, "--hbp-plan", str(tmp_path / "plan")],
        weights=str(tmp_path / "weights.pt"),
        gradients_at=[0],
    )
    for step in range(STEPS):
        # rounding grows through Adam where a gradient is near its epsilon
        tolerance = TOLERANCE if step == 0 else 10 * TOLERANCE
        read = by_document(ours, plan, step, "losses")
        for mine, alone in zip(read, truth["token_losses"][step], strict=True):
            # the last position has no target
            assert relative_difference(mine[:-1], alone[:-1]) < tolerance
    for rank in range(RANKS):
        worst, name = worst_gradient(ours[rank]["gradients_by_step"][0], truth["gradients"][0])
        assert worst < TOLERANCE, name
    losses = [step["lm loss"] for step in ours[0]["losses"]]
    np.testing.assert_allclose(losses, truth["losses"], rtol=TOLERANCE)
    np.testing.assert_allclose(ours[0]["gradient_norms"], truth["norms"], rtol=TOLERANCE)


def _documents_over_ranks(plan) -> int:
    """How many documents lie on more than one rank."""
    count = 0
    for pack in range(plan.num_packs):
        ends = np.cumsum(plan.seq_lens[plan.pack(pack)])
        starts = ends - plan.seq_lens[plan.pack(pack)]
        count += int(((ends - 1) // plan.token_budget > starts // plan.token_budget).sum())
    return count
