"""simulate(): the predicted time line of a plan, or of any other placement, on a cluster. Pure.

Guarantees (asserted by tests/unit/test_simulate.py):
- conservation: see timeline.py;
- memory: a few arrays of [micro-batches, ranks], none of [packs, ranks]; steps run in blocks.

Modelled:
- a pack takes each of its ranks what the cost model says; ranks of a pack begin together;
- with expert parallelism the ranks of an expert group wait for each other in every layer, so each
  forward and each backward takes as long as the slowest of them takes. An expert group is
  ep_size x expert_tp_size / tp_size neighbouring ranks; where that is one rank, and without
  experts, ranks meet in packs that they share and at the end of the step only;
- the pipeline of every rank, work by work (pipeline.py), then the reduction over all ranks;
- where levels are given, every micro-batch is S tokens on every rank, fillers included; without
  levels (online scheduling) packs cost their real tokens, and a rank without one goes on or waits.
Not modelled: sends between stages, what the first and last stage do more than others, noise, data
loading, checkpoints, evaluation.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_hbp.baselines import plan_placement
from megatron_hbp.cost_model import CostModel
from megatron_hbp.level import Level
from megatron_hbp.pipeline import Blocks, PipelineSeconds, run_pipeline
from megatron_hbp.placement import Placement
from megatron_hbp.plan import Plan
from megatron_hbp.rank_work import TERMS, RankWork, in_lockstep, rank_work
from megatron_hbp.timeline import LevelSeconds, Timeline

# Places [micro-batches, ranks] that are simulated at once: 8 MiB an array.
_PLACES_AT_ONCE = 1 << 20


def simulate(
    planned: Plan | Placement, cost: CostModel, levels: Sequence[Level] | None = None
) -> Timeline:
    """The time line of all steps.

    levels: of a placement, one for each CP size that occurs, to charge whole micro-batches and
    their recompute; None for a placement of real tokens only, with the least recompute that fits.
    A plan has its own. Raises ValueError when the layout is not the plan's, or a CP size has no
    level.
    """
    if isinstance(planned, Plan):
        plan, placement = planned, plan_placement(planned)
        if levels is not None and tuple(levels) != plan.levels:
            raise ValueError(
                f"levels are {_texts(levels)}, the plan's are {_texts(plan.levels)}; leave them out"
            )
        levels = plan.levels
        _check_layout(plan, cost)
    else:
        plan, placement = None, planned
        if placement.num_ranks != cost.layout.num_ranks:
            raise ValueError(
                f"the placement is for {placement.num_ranks} ranks, the cost model's layout has "
                f"{cost.layout.num_ranks}; give both the same ranks"
            )
    work = rank_work(placement, cost, None if levels is None else tuple(levels))
    runs = [(rows, _run_steps(placement, work, cost, rows)) for rows in _blocks_of_steps(placement)]
    return _timeline(plan, placement, work, cost, runs)


def _blocks_of_steps(placement: Placement) -> list[np.ndarray]:
    """Steps of equally many micro-batches, as many at once as memory should hold."""
    sizes = np.diff(placement.step_offsets)
    blocks = []
    for size in np.unique(sizes).tolist():
        rows = np.flatnonzero(sizes == size)
        at_once = max(1, _PLACES_AT_ONCE // (size * placement.num_ranks))
        blocks += [rows[first : first + at_once] for first in range(0, len(rows), at_once)]
    return blocks


def _run_steps(
    placement: Placement, work: RankWork, cost: CostModel, rows: np.ndarray
) -> PipelineSeconds:
    """Simulates steps of equally many micro-batches; waits inside layers are in `neighbour`."""
    first = placement.step_offsets[rows]
    size = int(placement.step_offsets[rows[0] + 1] - first[0])
    at = first + np.arange(size)[:, None]  # [micro-batches, steps]
    blocks = [Blocks(np.flatnonzero(begins)) for begins in work.begins[at]]
    forward = work.forward[at]
    backward = work.compute[at] + work.communication[at] - forward
    layout = cost.layout
    if layout.num_virtual_stages > 1 and size % layout.num_stages:
        # interleaving takes whole rounds: the rest are micro-batches without work
        empty = np.zeros((-size % layout.num_stages, *forward.shape[1:]))
        forward, backward = (np.concatenate([part, empty]) for part in (forward, backward))
        blocks += [Blocks(np.arange(empty[0].size))] * len(empty)
    if not in_lockstep(cost):
        ran = run_pipeline(forward, backward, blocks, layout.num_stages, layout.num_virtual_stages)
        return _whole(ran, size)
    slow_forward, slow_backward = (
        np.stack([block.largest(seconds) for block, seconds in zip(blocks, part, strict=True)])
        for part in (forward, backward)
    )
    ran = run_pipeline(
        slow_forward, slow_backward, blocks, layout.num_stages, layout.num_virtual_stages
    )
    waited = slow_forward + slow_backward - forward - backward
    charged = sum(
        block.blamed(busy, seconds)
        for block, busy, seconds in zip(blocks, forward + backward, waited, strict=True)
    )
    ran = replace(
        ran,
        neighbour=ran.neighbour + waited.sum(axis=0),
        neighbour_of=ran.neighbour_of + waited.sum(axis=2).T,
        blamed=ran.blamed + charged,
    )
    return _whole(ran, size)


def _whole(ran: PipelineSeconds, size: int) -> PipelineSeconds:
    """Micro-batches from `size` on are none: their waits count for the one before."""
    ends = np.minimum(np.arange(ran.bubble_of.shape[1]), size - 1).searchsorted(np.arange(size))
    return replace(
        ran,
        neighbour_of=np.add.reduceat(ran.neighbour_of, ends, axis=1),
        bubble_of=np.add.reduceat(ran.bubble_of, ends, axis=1),
    )


def _timeline(
    plan: Plan | None,
    placement: Placement,
    work: RankWork,
    cost: CostModel,
    runs: list[tuple[np.ndarray, PipelineSeconds]],
) -> Timeline:
    shape = (placement.num_steps, placement.num_ranks)
    end, neighbour, bubble, last_stage = (np.zeros(shape) for _ in range(4))
    waited = np.zeros((2, placement.num_microbatches))
    charged = np.zeros(placement.num_ranks)
    for rows, ran in runs:
        end[rows], neighbour[rows] = ran.end, ran.neighbour
        bubble[rows], last_stage[rows] = ran.bubble, ran.last_stage
        charged += ran.blamed
        at = placement.step_offsets[rows][:, None] + np.arange(ran.bubble_of.shape[1])
        waited[0, at], waited[1, at] = ran.neighbour_of, ran.bubble_of
    slowest = end.max(axis=1)
    step_wait = slowest[:, None] - end
    reduction = np.full(placement.num_steps, cost.reduction_seconds)
    pack_step = np.searchsorted(placement.step_offsets, placement.pack_microbatch, side="right") - 1
    pack_ends = np.searchsorted(pack_step, np.arange(shape[0] + 1))
    by_level = []
    for index, level in enumerate(work.levels):
        here = work.microbatch_level == index
        by_level.append(
            LevelSeconds(
                level=level,
                num_microbatches=int(np.count_nonzero(here)),
                tokens=int(work.level_tokens[index]),
                terms=dict(zip(TERMS, work.terms[index].tolist(), strict=True)),
                filler=float(work.filler[index]),
                neighbour=float(waited[0, here].sum()),
                bubble=float(waited[1, here].sum()),
            )
        )
    return Timeline(
        cost=cost,
        plan=plan,
        compute=placement.step_sums(work.compute),
        communication=placement.step_sums(work.communication),
        wait=neighbour + step_wait,
        step_wait=step_wait,
        bubble=bubble,
        reduction=reduction,
        seconds=slowest + reduction,
        last_stage=last_stage,
        microbatch_seconds=work.compute + work.communication,
        charged=charged,
        tokens=_run_sums(work.tokens, pack_ends),
        squares=_run_sums(work.squares, pack_ends),
        by_level=tuple(by_level),
    )


def _run_sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """int64 [runs]: sums of int64 `values` from each offset to the next."""
    ends = np.concatenate([[0], np.cumsum(values)])
    return ends[offsets[1:]] - ends[offsets[:-1]]


def _check_layout(plan: Plan, cost: CostModel) -> None:
    layout = cost.layout
    for name, planned, given in (
        ("ranks", plan.num_ranks, layout.num_ranks),
        ("micro-batches a step", plan.num_microbatches, layout.num_microbatches),
        ("pipeline stages", plan.num_stages, layout.num_stages),
        ("virtual stages", plan.num_virtual_stages, layout.num_virtual_stages),
    ):
        if planned != given:
            raise ValueError(
                f"the plan has {planned} {name}, the cost model's layout {given}; give the layout "
                "of the plan"
            )


def _texts(levels: Sequence[Level]) -> str:
    return " ".join(map(str, levels))
