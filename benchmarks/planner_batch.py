"""plan_batch(): one global batch at a time, as reinforcement learning needs it."""

import time

import numpy as np

from benchmarks.planner_figures import Row, at_most, shown
from benchmarks.planner_speed import LEVELS
from benchmarks.planner_workloads import Workloads
from megatron_hbp import Plan, plan_batch
from megatron_hbp.baselines import plan_placement
from megatron_hbp.cost import DENSE_8B_H100

NUM_SEQUENCES, NUM_RANKS, NUM_SEEDS = 16_384, 64, 100
MAX_OVER_BOUND, MAX_MILLISECONDS = 1.05, 5.0


def batch(workloads: Workloads) -> Row:
    title = f"plan_batch(), {NUM_SEQUENCES} sequences of tulu, {NUM_RANKS} ranks, {NUM_SEEDS} seeds"
    corpus = workloads.lengths("tulu", 1_000_000)
    seconds, slowest, lockstep = [], [], []
    for seed in range(NUM_SEEDS):
        rng = np.random.Generator(np.random.PCG64(seed))
        lens = rng.choice(corpus, NUM_SEQUENCES)
        start = time.perf_counter()
        plan = plan_batch(lens, LEVELS, NUM_RANKS, seed=seed, cost=DENSE_8B_H100)
        seconds.append(time.perf_counter() - start)
        costs = _rank_costs(plan)
        bound = _bound(lens)
        slowest.append(costs.sum(axis=0).max() / bound)
        lockstep.append(costs.max(axis=1).sum() / bound)
    figures = [
        at_most(
            "p95 of largest rank cost / bound",
            float(np.percentile(slowest, 95)),
            MAX_OVER_BOUND,
            bound=1.0,
        ),
        shown("  median of it", float(np.median(slowest)), bound=1.0),
        shown("p95 of lockstep cost / bound", float(np.percentile(lockstep, 95)), bound=1.0),
        at_most("median time", float(np.median(seconds)) * 1e3, MAX_MILLISECONDS, ".2f ms"),
        shown("p95 of time", float(np.percentile(seconds, 95)) * 1e3, ".2f ms"),
    ]
    notes = [
        "cost: work of an 8B dense model on H100, summed over micro-batches; bound: the larger of "
        f"all work / ranks and that of the costliest sequence / {LEVELS[-1].cp_size}; lockstep: "
        "ranks wait in every micro-batch"
    ]
    return Row("batch", title, figures, notes)


def _rank_costs(plan: Plan) -> np.ndarray:
    """float64 [micro-batches, ranks]: work of each rank, without communication."""
    placement = plan_placement(plan)
    lens = placement.seq_lens[placement.sequence_ids].astype(np.int64)
    work = DENSE_8B_H100.work(
        np.diff(placement.pack_offsets),
        placement.pack_sums(lens),
        placement.pack_sums(lens * lens),
    )
    return placement.rank_sums(work / placement.pack_cp)


def _bound(lens: np.ndarray) -> float:
    """The least possible cost of the rank with most of it."""
    lens = lens.astype(np.int64)
    work = DENSE_8B_H100.work(np.ones(len(lens)), lens, lens * lens)
    return max(float(work.sum()) / NUM_RANKS, float(work.max()) / LEVELS[-1].cp_size)
