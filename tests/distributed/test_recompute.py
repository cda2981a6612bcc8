"""Recompute changes no number, runs for the levels that ask for it and for no other, and sees the
boundaries and group of its own micro-batch."""

from collections import Counter

import pytest

from tests.distributed import flags
from tests.distributed.layouts import Layout, assert_same, schedule

RANKS = Layout(4, ep_size=2)
MODEL = [*flags.MLA, *flags.moe()]
NUM_LAYERS = 4
FULL = [
    *("--recompute-granularity", "full"),
    *("--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
]
SELECTIVE = [
    *("--recompute-granularity", "selective"),
    *("--recompute-modules", "core_attn", "mla_up_proj"),
]


def layer_visits(run, cp_size: int) -> Counter:
    """How often attention ran at a CP size, per (layer, whether it built a graph), on rank 0."""
    return Counter(
        (visit["layer"], visit["with_graph"])
        for visit in run.ranks[0]["visits"]
        if visit["cp_size"] == cp_size
    )


def twice(num_microbatches: int, layers: range) -> Counter:
    """Layers run without a graph in forward, with one when they are recomputed."""
    return Counter({(i, graph): num_microbatches for i in layers for graph in (False, True)})


def once(num_microbatches: int, layers: range) -> Counter:
    return Counter({(i, True): num_microbatches for i in layers})


ALL = range(1, NUM_LAYERS + 1)


@pytest.mark.parametrize("recompute", [FULL, SELECTIVE], ids=["full", "selective"])
def test_recompute_by_the_hosts_flags(bench, recompute):
    reference = bench.run(RANKS, "1", MODEL)
    run = bench.run(RANKS, "microbatch", [*MODEL, *recompute])
    assert_same(run, reference)
    cp_sizes = schedule("microbatch", RANKS, 4)
    for cp_size in (1, 2, 4):
        assert layer_visits(run, cp_size) == twice(cp_sizes.count(cp_size), ALL)
        assert layer_visits(reference, cp_size) == once(8 if cp_size == 1 else 0, ALL)


def test_recompute_by_level_runs_for_that_levels_microbatches_only(bench):
    run = bench.run(RANKS, "microbatch", MODEL, levels=("64:1:2", "128:2:full", "256:4"))
    assert_same(run, bench.run(RANKS, "1", MODEL))
    cp_sizes = schedule("microbatch", RANKS, 4)
    count = {cp: cp_sizes.count(cp) for cp in (1, 2, 4)}
    assert min(count.values()) >= 2
    block, rest = range(1, 3), range(3, NUM_LAYERS + 1)
    assert layer_visits(run, 1) == twice(count[1], block) + once(count[1], rest)
    assert layer_visits(run, 2) == twice(count[2], ALL)
    assert layer_visits(run, 4) == once(count[4], ALL)


@pytest.mark.slow
def test_a_level_without_recompute_keeps_the_users_selective_recompute(bench):
    run = bench.run(
        RANKS, "microbatch", [*MODEL, *SELECTIVE], levels=("64:1", "128:2:full", "256:4")
    )
    assert_same(run, bench.run(RANKS, "1", MODEL))
    cp_sizes = schedule("microbatch", RANKS, 4)
    assert layer_visits(run, 1) == twice(cp_sizes.count(1), ALL)
    assert layer_visits(run, 4) == twice(cp_sizes.count(4), ALL)


def test_br_n02_recompute_sees_the_boundaries_and_group_of_its_own_microbatch(bench):
    """Two stages, four micro-batches: several are in flight when the first is recomputed."""
    layout = Layout(2, pp_size=2, ep_size=2, num_microbatches=4)
    cp_sizes = "1,2,2,1,2,1,1,2"
    model = [*flags.MLA, *flags.moe()]
    plain = bench.run(layout, cp_sizes, model, num_steps=2)
    run = bench.run(layout, cp_sizes, model, num_steps=2, levels=("64:1:full", "128:2:full"))
    assert_same(run, plain)
    for place, rank in enumerate(run.ranks):
        visits = rank["visits"]
        layer = visits[0]["layer"]
        what = [
            (v["with_graph"], (v["cu_seqlens"], v["max_seqlen"], v["members"]))
            for v in visits
            if v["layer"] == layer
        ]
        forward = [pack for with_graph, pack in what if not with_graph]
        recomputed = [pack for with_graph, pack in what if with_graph]
        assert len(forward) == 8
        assert recomputed == forward
        if place < layout.num_ranks:  # first stage: another micro-batch's forward came between
            assert [with_graph for with_graph, _ in what[:3]] == [False, False, True]
            assert what[1][1] != what[0][1]
