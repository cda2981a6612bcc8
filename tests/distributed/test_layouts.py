"""Across layouts: from one checkpoint, the same tokens give the same loss and gradient norm.

Tokens lie on other ranks here and sums run in another order, so the bound is 1e-5, not bits. No
auxiliary loss: it is a function of a rank's own tokens.
"""

import numpy as np
import pytest

from tests.distributed import flags, handmade
from tests.distributed.layouts import RATE_ZERO, Layout, cp_sizes_seen, slot_corpus

MODEL = [*flags.MLA, *flags.moe()]
SPLITS = {  # layout, CP size of each micro-batch; every step has the same 16 slots of tokens
    "8 ranks, 4 x CP 2, 2 x CP 4": (Layout(8), "1,1,2,2,4,4,1,4"),
    "8 ranks, EP 4": (Layout(8, ep_size=4), "1,2"),
    "TP 2 x 4, EP 2": (Layout(4, tp_size=2, ep_size=2, num_microbatches=4), "1,1,1,1,2,2,1,2"),
    "PP 2 x 4": (Layout(4, pp_size=2, num_microbatches=4), "1,1,1,1,4,1,4,2"),
    "TP 2 x PP 2 x 2": (Layout(2, tp_size=2, pp_size=2, num_microbatches=8), "1,1,2,2,1,2,1,2"),
}
SLOW = {"8 ranks, EP 4", "TP 2 x PP 2 x 2"}


@pytest.fixture(scope="module")
def one_rank(bench, start):
    """All 16 slots on one process, one after another: nothing is split."""
    layout = Layout(1, num_microbatches=16)
    return bench.run(layout, "1", [*MODEL, *RATE_ZERO, *start], num_steps=1, same_tokens=True)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SPLITS]
)
def test_step_one_is_that_of_a_single_process(bench, start, one_rank, name):
    layout, cp_sizes = SPLITS[name]
    num_steps = (cp_sizes.count(",") + 1) // layout.num_microbatches
    run = bench.run(
        layout, cp_sizes, [*MODEL, *RATE_ZERO, *start], num_steps=num_steps, same_tokens=True
    )
    assert cp_sizes_seen(run) == set(map(int, cp_sizes.split(",")))
    assert run.trained == one_rank.trained * num_steps
    np.testing.assert_allclose(run.losses, one_rank.losses * num_steps, rtol=1e-5)
    np.testing.assert_allclose(run.gradient_norms, one_rank.gradient_norms * num_steps, rtol=1e-5)


PACKS = ([256], [150, 106], [3, 253], [128, 126])  # documents of one pack per step; two-token tail


def run_spanning(bench, start, num_ranks: int, attention: list[str]):
    """One pack of 256 tokens a step over num_ranks ranks, its documents spanning them."""
    layout = Layout(num_ranks, num_microbatches=1, budget=256 // num_ranks)
    name = f"spanning-{num_ranks}-{len(attention)}"
    corpus, ids = slot_corpus(bench.folder / name, list(PACKS))
    plan = handmade.plan_over_slots(
        corpus,
        ids,
        [num_ranks] * len(PACKS),
        budget=layout.budget,
        num_ranks=num_ranks,
        num_microbatches=1,
    )
    plan.save(bench.folder / f"{name}-plan")
    return bench.run_plan(layout, bench.folder / f"{name}-plan", [*attention, *flags.moe(), *start])


def test_documents_that_span_cp_ranks(bench, start):
    """Four steps of one or two documents over 2 and 4 ranks equal one rank that holds the pack."""
    whole = run_spanning(bench, start, 1, flags.MLA)
    for num_ranks in (2, 4):
        run = run_spanning(bench, start, num_ranks, flags.MLA)
        assert cp_sizes_seen(run) == {num_ranks}
        assert run.trained == whole.trained
        np.testing.assert_allclose(run.losses, whole.losses, rtol=1e-5)
        np.testing.assert_allclose(run.gradient_norms, whole.gradient_norms, rtol=1e-5)
    assert len(set(whole.losses)) == len(PACKS)
