"""CP switched per micro-batch under pipelines, virtual stages, tensor and expert parallelism."""

from collections import defaultdict

import numpy as np
import pytest

from tests.distributed import flags
from tests.distributed.layouts import (
    RATE_ZERO,
    Layout,
    assert_same,
    assert_steps_same,
    cp_sizes_seen,
)
from tests.distributed.test_recompute import FULL, SELECTIVE

MODEL = [*flags.MLA, *flags.moe()]
VIRTUAL = ["--num-virtual-stages-per-pipeline-rank", "2"]
TP_PP_EP = Layout(2, tp_size=2, pp_size=2, ep_size=2)


def packs_by_rank(run, layout: Layout) -> dict[int, list[list[tuple]]]:
    """Per place in the DP x CP domain, what each of its TP x PP processes saw, in order, once each.

    The host orders processes by TP, then DP, then PP.
    """
    seen = defaultdict(list)
    for process, rank in enumerate(run.ranks):
        layer = rank["visits"][0]["layer"]
        packs = [
            (tuple(v["cu_seqlens"]), v["max_seqlen"], v["cp_size"])
            for v in rank["visits"]
            if v["layer"] == layer and v["with_graph"]
        ]
        seen[process // layout.tp_size % layout.num_ranks].append(packs)
    return seen


def check_same_packs(run, layout: Layout, num_microbatches: int) -> None:
    for processes in packs_by_rank(run, layout).values():
        assert len(processes) == layout.tp_size * layout.pp_size
        assert all(packs == processes[0] for packs in processes)
        assert len(processes[0]) == num_microbatches
        assert len(set(processes[0])) > num_microbatches // 2  # the shapes really differ
        for bounds, max_seqlen, cp_size in processes[0]:
            assert bounds[-1] == layout.budget * cp_size
            assert max_seqlen == max(np.diff(bounds))


def test_tensor_pipeline_and_expert_parallel(bench):
    reference = bench.run(TP_PP_EP, "1", MODEL)
    run = bench.run(TP_PP_EP, "microbatch", MODEL)
    assert cp_sizes_seen(run) == {1, 2}
    assert_same(run, reference)


def test_br_d03_every_process_of_a_rank_sees_the_same_boundaries(bench):
    check_same_packs(bench.run(TP_PP_EP, "microbatch", MODEL), TP_PP_EP, 8)


def test_br_d10_br_d11_the_host_sees_one_document_of_s_tokens_on_every_cp_rank(bench):
    """Its bounds run from 0 to S also on CP ranks above 0; no padded list, no CP group of its own.

    A pack's documents are counted once: in its own boundaries, which all of its ranks share.
    """
    run = bench.run(TP_PP_EP, "microbatch", MODEL)
    visits = [visit for rank in run.ranks for visit in rank["visits"]]
    budget = TP_PP_EP.budget
    assert {visit["cp_size"] for visit in visits} == {1, 2}
    for visit in visits:
        assert visit["host_bounds"] == [0, budget]
        assert visit["host_padded_bounds"] is None
        assert visit["host_group"] is None
        assert visit["positions"][1] == budget
        assert visit["cu_seqlens"][-1] == budget * visit["cp_size"]


@pytest.mark.slow
def test_br_d03_middle_stages(bench):
    layout = Layout(1, tp_size=2, pp_size=4)
    check_same_packs(bench.run(layout, "1", MODEL, num_steps=5), layout, 10)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [FULL, SELECTIVE], ids=["full", "selective"])
def test_tensor_pipeline_and_expert_parallel_with_recompute(bench, recompute):
    reference = bench.run(TP_PP_EP, "1", MODEL)
    assert_same(bench.run(TP_PP_EP, "microbatch", [*MODEL, *recompute]), reference)


@pytest.mark.parametrize("virtual", [[], VIRTUAL], ids=["plain", "virtual"])
def test_br_i02_stages_exchange_s_tokens_at_every_level(bench, virtual):
    layout = Layout(4, pp_size=2, ep_size=2)
    run = bench.run(
        layout,
        "1,1,4,4,1,4,2,1",
        [*MODEL, *virtual, *RATE_ZERO],
        same_tokens=True,
    )
    assert cp_sizes_seen(run) == {1, 2, 4}
    assert_steps_same(run)
    assert {v["tokens"] for rank in run.ranks for v in rank["visits"]} == {layout.budget}


@pytest.mark.slow
def test_virtual_stages_over_four_steps(bench):
    layout = Layout(2, pp_size=2, ep_size=2, num_microbatches=4)
    model = [*MODEL, *VIRTUAL]
    reference = bench.run(layout, "1", model)
    assert_same(bench.run(layout, "microbatch", model), reference)
    by_level = bench.run(layout, "microbatch", model, levels=("64:1:2", "128:2:full"))
    assert_same(by_level, reference)


def test_br_i01_four_stages_with_packs_of_unlike_lengths(bench):
    layout = Layout(2, pp_size=4, ep_size=2, num_microbatches=4)
    run = bench.run(
        layout, "1,1,1,1,2,2,2,2,1,2,1,2", [*MODEL, *RATE_ZERO], num_steps=3, same_tokens=True
    )
    assert cp_sizes_seen(run) == {1, 2}
    assert_steps_same(run)


@pytest.mark.slow
def test_four_stages_over_four_steps(bench):
    layout = Layout(2, pp_size=4, ep_size=2, num_microbatches=4)
    reference = bench.run(layout, "1", MODEL)
    assert_same(bench.run(layout, "microbatch", MODEL), reference)
    assert_same(bench.run(layout, "step", MODEL), reference)
