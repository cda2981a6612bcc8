"""replan(): what a plan has not trained yet, planned again: other ranks, levels, micro-batches.

Guarantees (asserted by tests/unit/test_replan.py):
- what the parent trained and what the new plan trains is each sequence once per epoch, or as often
  as its weight says; a plan made by replan() can be replanned itself;
- kept lengths, drops and truncations are the parent's: nothing gets longer, nothing is lost;
- epoch e stays epoch e of the run: its repeats and shuffles do not depend on where a plan began;
- the same arguments give the same bytes.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hbp.alignment import Alignment
from megatron_hbp.alignment import alignment as default_alignment
from megatron_hbp.layout import checked_shape, planned_arrays
from megatron_hbp.level import Level
from megatron_hbp.mixing import source_classes
from megatron_hbp.plan import Plan
from megatron_hbp.weights import epoch_ids


@dataclass(frozen=True)
class Rest:
    """What a plan has not trained. epochs: numbers in the whole run, the first one maybe partial.

    carried_ids: int32|int64, ids that the first of them still trains, ascending, each as often as
    it does; None: all of it.
    """

    epochs: range
    carried_ids: np.ndarray | None


def rest_of(plan: Plan, consumed_steps: int) -> Rest:
    """What `plan` has not trained after consumed_steps of its steps.

    Raises ValueError unless there are that many steps, and at least one more.
    """
    if not 0 <= consumed_steps <= plan.num_steps:
        raise ValueError(
            f"{consumed_steps} steps are consumed, the plan has {plan.num_steps}: name the plan "
            "that was trained, and how many steps of it, those of its parents not counted"
        )
    if consumed_steps == plan.num_steps:
        raise ValueError(
            f"all {consumed_steps} steps of the plan are trained, nothing is left to plan; to go "
            "on, make another plan and load the weights with --finetune"
        )
    epoch = int(np.searchsorted(plan.epoch_offsets, consumed_steps, side="right")) - 1
    epochs = range(plan.first_epoch + epoch, plan.first_epoch + plan.epochs)
    if consumed_steps == plan.epoch_offsets[epoch]:
        return Rest(epochs, plan.carried_ids if epoch == 0 else None)
    steps = np.array([consumed_steps, plan.epoch_offsets[epoch + 1]])
    low, high = plan.pack_offsets[plan.microbatch_offsets[steps * plan.num_microbatches]]
    return Rest(epochs, np.sort(plan.sequence_ids[low:high]))


def replan(
    plan: Plan,
    consumed_steps: int,
    *,
    levels: Sequence[Level] | None = None,
    num_ranks: int | None = None,
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    num_virtual_stages: int | None = None,
    mixing: str | None = None,
    max_mixing: float | None = None,
    curriculum_steps: int | None = None,
    alignment: Alignment | None = None,
) -> Plan:
    """Plans exactly what `plan` has not trained after consumed_steps of its steps.

    Arguments as in build_plan(); what is None stays as it is in `plan`: mixing is auto where it was
    or where the plan has one stage; curriculum_steps are as many steps as it takes for the tokens
    of those that were not trained; alignment is the plan's where the levels are, else that of
    contiguous CP without FP8. Raises ValueError for anything a user can get wrong, among it a
    sequence that is not trained yet and longer than the longest level: the lengths that `plan`
    keeps stay.
    """
    rest = rest_of(plan, consumed_steps)
    levels = plan.levels if levels is None else tuple(levels)
    if alignment is None:
        alignment = (
            plan.alignment
            if levels == plan.levels
            else default_alignment(tuple(level.cp_size for level in levels))
        )
    num_ranks = plan.num_ranks if num_ranks is None else num_ranks
    if num_microbatches is None:
        num_microbatches = plan.num_microbatches
    num_stages = plan.num_stages if num_stages is None else num_stages
    if num_virtual_stages is None:
        num_virtual_stages = plan.num_virtual_stages
    if mixing is None:
        mixing = "auto" if plan.alike or plan.num_stages == 1 else plan.mixing
        mixing = "step" if plan.mixing == "step" else mixing
    max_mixing = plan.max_mixing if max_mixing is None else max_mixing
    if curriculum_steps is None:
        left = max(0, plan.curriculum_steps - consumed_steps) * plan.slots_per_step
        tokens_per_step = max(1, num_ranks * num_microbatches) * levels[0].tokens_per_rank
        curriculum_steps = -(-left * plan.token_budget // tokens_per_step)
    shape = checked_shape(
        levels,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_stages=num_stages,
        num_virtual_stages=num_virtual_stages,
        mixing=mixing,
        max_mixing=max_mixing,
        curriculum_steps=curriculum_steps,
        cost=plan.cost,
        alignment=alignment,
        sources=source_classes(plan.seq_lens, plan.source_ids),
    )
    _check_lengths(plan, rest, shape.longest())

    def chosen(epoch: int) -> np.ndarray | None:
        if epoch == rest.epochs[0] and rest.carried_ids is not None:
            return rest.carried_ids
        if plan.source_weights is None or plan.source_ids is None:
            return None
        return epoch_ids(plan.seq_lens, plan.source_ids, plan.source_weights, plan.seed, epoch)

    arrays = planned_arrays(
        plan.seq_lens,
        shape,
        rest.epochs,
        chosen=chosen,
        packer=plan.packer,
        curriculum_steps=curriculum_steps,
        seed=plan.seed,
    )
    return dataclasses.replace(
        plan,
        levels=levels,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_stages=num_stages,
        num_virtual_stages=num_virtual_stages,
        mixing="microbatch" if mixing == "auto" else mixing,
        max_mixing=float(max_mixing),
        curriculum_steps=curriculum_steps,
        alignment=alignment,
        alike=shape.alike,
        parent_hash=plan.hash(),
        parent_steps=consumed_steps,
        first_epoch=rest.epochs[0],
        steps_before=plan.steps_before + consumed_steps,
        slots_before=plan.slots_before + consumed_steps * plan.slots_per_step,
        carried_ids=rest.carried_ids,
        **arrays,
    )


def _check_lengths(plan: Plan, rest: Rest, longest: int) -> None:
    lens = plan.seq_lens
    if len(rest.epochs) == 1 and rest.carried_ids is not None:
        waiting = np.unique(rest.carried_ids)
    else:
        waiting = np.flatnonzero(lens)
    too_long = waiting[lens[waiting] > longest]
    if len(too_long):
        raise ValueError(
            f"sequence {too_long[0]} keeps {lens[too_long[0]]} tokens and is not trained yet, but "
            f"the longest level holds {longest}; {len(too_long)} of {len(waiting)} such sequences "
            f"are over-long; the plan keeps every length: add a level of "
            f"{int(lens[too_long].max())} tokens or more"
        )
