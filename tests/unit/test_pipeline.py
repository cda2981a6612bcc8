"""The pipeline of a step against a slow simulation, hand-computed times and the formula."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hbp.metrics import pipeline_stretch
from megatron_hbp.pipeline import Blocks, Work, run_pipeline, stage_order, work_order


def _singles(num_steps, num_ranks):
    return Blocks(np.arange(num_steps * num_ranks))


def _run(forward, backward, stages=1, chunks=1, blocks=None):
    """Of times [micro-batches] or [micro-batches, ranks]: one step."""
    forward, backward = (
        np.array(t, dtype=float).reshape(len(t), 1, -1) for t in (forward, backward)
    )
    size, _, ranks = forward.shape
    return run_pipeline(forward, backward, blocks or [_singles(1, ranks)] * size, stages, chunks)


def _slow_orders(size, stages, chunks):
    """What each stage does: (F or B, place in the model, micro-batch)."""
    rounds = [range(first, min(first + stages, size)) for first in range(0, size, stages)]
    orders = []
    for stage in range(stages):
        up = [("F", c * stages + stage, m) for g in rounds for c in range(chunks) for m in g]
        down = [
            ("B", c * stages + stage, m) for g in rounds for c in reversed(range(chunks)) for m in g
        ]
        ahead = stages - 1 - stage if chunks == 1 else 2 * (stages - 1 - stage)
        ahead = min(len(up), ahead + (chunks - 1) * stages)
        order = up[:ahead]
        for turn in range(len(up)):
            order += [up[ahead + turn]] if ahead + turn < len(up) else []
            order.append(down[turn])
        orders.append(order)
    return orders


def _slow(forward, backward, groups, stages, chunks):
    """End of each rank, by asking again and again when each piece of work can begin.

    forward, backward: [micro-batches][ranks]. groups: per micro-batch, lists of ranks that begin
    together.
    """
    size, ranks = len(forward), len(forward[0])
    orders = _slow_orders(size, stages, chunks)
    last = stages * chunks - 1
    ends = {}
    for _ in range(2 * size * chunks * stages + 1):
        changed = False
        for order in orders:
            for turn, (kind, place, m) in enumerate(order):
                before = [] if turn == 0 else [order[turn - 1]]
                if kind == "F" and place > 0:
                    before.append(("F", place - 1, m))
                if kind == "B":
                    before.append(("B", place + 1, m) if place < last else ("F", place, m))
                if any(work not in ends for work in before):
                    continue
                ready = [max((ends[work][r] for work in before), default=0.0) for r in range(ranks)]
                found = list(ready)
                for group in groups[m]:
                    for r in group:
                        found[r] = max(ready[other] for other in group)
                    for r in group:
                        found[r] += (forward if kind == "F" else backward)[m][r] / chunks
                if ends.get((kind, place, m)) != found:
                    ends[kind, place, m] = found
                    changed = True
        if not changed:
            break
    assert len(ends) == 2 * size * chunks * stages
    return [max(end[r] for end in ends.values()) for r in range(ranks)]


@st.composite
def _steps(draw):
    stages, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    if stages == 1:
        chunks = 1
    size, ranks = (
        draw(st.integers(1, 6) if chunks == 1 else st.integers(1, 2)),
        draw(st.sampled_from([1, 2, 4])),
    )
    size *= stages if chunks > 1 else 1
    times = st.lists(
        st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks), min_size=size, max_size=size
    )
    widths = draw(
        st.lists(
            st.sampled_from([w for w in (1, 2, 4) if w <= ranks]), min_size=size, max_size=size
        )
    )
    return stages, chunks, draw(times), draw(times), widths


@given(_steps())
@settings(max_examples=150, deadline=None)
def test_times_are_those_of_a_slow_simulation(step):
    stages, chunks, forward, backward, widths = step
    ranks = len(forward[0])
    groups = [[list(range(r, r + w)) for r in range(0, ranks, w)] for w in widths]
    blocks = [Blocks(np.arange(0, ranks, w)) for w in widths]
    ran = _run(forward, backward, stages, chunks, blocks)
    assert np.allclose(ran.end[0], _slow(forward, backward, groups, stages, chunks))
    busy = np.sum(forward, axis=0) + np.sum(backward, axis=0)
    assert np.allclose(busy + ran.neighbour[0] + ran.bubble[0], ran.end[0])
    assert np.isclose(ran.neighbour_of.sum(), ran.neighbour.sum())
    assert np.isclose(ran.blamed.sum(), ran.neighbour.sum())
    assert np.isclose(ran.bubble_of.sum(), ran.bubble.sum())


def test_many_steps_at_once_are_each_for_itself():
    rng = np.random.default_rng(0)
    forward, backward = rng.random((2, 5, 7, 4))
    starts = [rng.random((7, 4)) < 0.5 for _ in range(5)]
    for begins in starts:
        begins[:, 0] = True
    together = run_pipeline(forward, backward, [Blocks(np.flatnonzero(b)) for b in starts], 3)
    for step in range(7):
        alone = run_pipeline(
            forward[:, step : step + 1],
            backward[:, step : step + 1],
            [Blocks(np.flatnonzero(b[step])) for b in starts],
            3,
        )
        for name in ("end", "neighbour", "bubble", "last_stage", "neighbour_of", "bubble_of"):
            assert np.allclose(getattr(together, name)[step], getattr(alone, name)[0])


@pytest.mark.parametrize(("stages", "chunks", "size"), [(1, 1, 3), (4, 1, 8), (8, 1, 3), (4, 2, 8)])
def test_equal_microbatches_take_what_the_formula_says(stages, chunks, size):
    """(M + (p - 1) / v) t, whatever the share of the forward."""
    for share in (0.5, 1 / 3):
        ran = _run([6 * share] * size, [6 * (1 - share)] * size, stages, chunks)
        assert np.isclose(ran.end[0, 0], 6 * (size + (stages - 1) / chunks))
        assert np.isclose(ran.bubble[0, 0], 6 * (stages - 1) / chunks)
        assert ran.neighbour[0, 0] == 0


def _formula(times, stages):
    """sum t + (p - 1) max t, from the stretch of the metrics."""
    even = (len(times) + stages - 1) * times.mean()
    return pipeline_stretch(times[None], stages) * even


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=24), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_the_formula_of_the_metrics_bounds_steps_that_rise_and_fall(times, stages):
    """Without interleaving; it is exact for equal micro-batches (above)."""
    rising = np.sort(times)
    for ordered in (rising, rising[::-1], np.concatenate([rising[::2], rising[1::2][::-1]])):
        end = _run(ordered / 3, ordered * 2 / 3, stages).end[0, 0]
        assert end <= _formula(ordered, stages) * (1 + 1e-9)


def test_unlike_neighbours_cost_more_than_the_formula():
    """Long beside short, again and again: almost every turn of a stage waits for a long one."""
    times = np.array([3.0, 1.0] * 16)
    turns = _run(times / 3, times * 2 / 3, 4).end[0, 0]
    rising = np.sort(times)
    assert turns > 1.3 * _formula(times, 4)
    assert _run(rising / 3, rising * 2 / 3, 4).end[0, 0] <= _formula(times, 4)


def test_two_stages_by_hand():
    """F 1, B 2 twice, then F 2, B 4: stage 0 ends its last backward at 19."""
    ran = _run([1, 1, 2], [2, 2, 4], 2)
    # stage 0: F0 0-1 | F1 1-2, B0 4-6 | F2 6-8, B1 8-10 | B2 14-18
    # stage 1: F0 1-2, B0 2-4 | F1 4-5, B1 5-7 | F2 8-10, B2 10-14
    assert ran.end[0, 0] == 18
    assert ran.bubble[0, 0] == 18 - 12
    assert ran.last_stage[0, 0] == 13


def test_a_stage_works_in_the_order_of_1f1b():
    def text(order):
        return " ".join(f"{'F' if w.forward else 'B'}{w.chunk}{w.microbatch}" for w in order)

    assert text(stage_order(0, 2, 1, 3)) == "F00 F01 B00 F02 B01 B02"
    assert text(stage_order(1, 2, 1, 3)) == "F00 B00 F01 B01 F02 B02"
    assert text(stage_order(1, 2, 2, 2)) == "F00 F01 F10 B10 F11 B11 B00 B01"
    assert text(stage_order(3, 8, 1, 2)) == "F00 F01 B00 B01"


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_all_work_is_done_once_and_after_what_it_needs(stages, chunks, size):
    size *= stages if chunks > 1 else 1
    order = work_order(stages, chunks, size)
    every = itertools.product(range(stages), range(chunks), range(size), (True, False))
    assert sorted(order) == sorted(Work(*work) for work in every)


def test_interleaving_needs_whole_rounds():
    with pytest.raises(ValueError, match="5 micro-batches a step are no multiple of 2 interleaved"):
        _run([1.0] * 5, [1.0] * 5, 2, 2)


def test_waiting_for_a_neighbour_is_charged_to_the_slow_rank():
    """Rank 1 is late by 3 when both begin the second micro-batch."""
    ran = _run([[1, 2], [1, 1]], [[2, 4], [2, 2]], blocks=[_singles(1, 2), Blocks(np.array([0]))])
    assert ran.neighbour.tolist() == [[3, 0]]
    assert ran.blamed.tolist() == [0, 3]
    assert ran.neighbour_of.tolist() == [[0, 3]]
    assert ran.end.tolist() == [[9, 9]]
