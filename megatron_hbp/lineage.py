"""Whether a plan made by replan() is exactly the rest of its parent: nothing lost, nothing twice.

Guarantees (asserted by tests/unit/test_replan.py): the answer comes from the two plans' arrays
alone, not from how replan() works; damaged parents and plans are reported.
"""

import numpy as np

from megatron_hbp.audit import array_hash
from megatron_hbp.plan import Plan

_INHERITED = (
    "seed",
    "packer",
    "overlong",
    "cost",
    "source_weights",
    "tokens_in",
    "tokens_dropped",
    "tokens_truncated",
    "seq_lens_hash",
    "first_trained_hash",
    "corpus_hash",
)
_INHERITED_ARRAYS = ("seq_lens", "source_ids", "dropped_ids", "dropped_reason", "truncated_ids")


def lineage_problems(plan: Plan, parent: Plan) -> list[str]:
    """Whether `plan` is exactly the rest of `parent`, in words; none when it is.

    That each plan trains what it says is Plan.audit()'s part.
    """
    if plan.parent_hash != parent.hash():
        other = "has no parent" if plan.parent_hash is None else f"goes on from {plan.parent_hash}"
        return [f"the plan {other}, this one is {parent.hash()}"]
    steps = plan.parent_steps
    if not 0 <= steps < parent.num_steps:
        return [f"the plan goes on after step {steps} of a parent of {parent.num_steps} steps"]
    problems = [
        f"{name} is not the parent's"
        for name in _INHERITED
        if getattr(plan, name) != getattr(parent, name)
    ]
    for name in _INHERITED_ARRAYS:
        mine, theirs = getattr(plan, name), getattr(parent, name)
        if (mine is None) != (theirs is None) or (
            mine is not None and array_hash(mine) != array_hash(theirs)
        ):
            problems.append(f"{name} are not the parent's")
    epoch = int(np.searchsorted(parent.epoch_offsets, steps, side="right")) - 1
    for name, wanted in (
        ("first_epoch", parent.first_epoch + epoch),
        ("epochs", parent.epochs - epoch),
        ("steps_before", parent.steps_before + steps),
        ("slots_before", parent.slots_before + steps * parent.slots_per_step),
    ):
        if getattr(plan, name) != wanted:
            problems.append(f"{name} is {getattr(plan, name)}, it must be {wanted}")
    return problems + _trained_problems(plan, parent, epoch)


def _trained_problems(plan: Plan, parent: Plan, epoch: int) -> list[str]:
    """What the parent trained of an epoch and what the plan's first one trains: all of it, once."""
    steps = np.array(
        [parent.epoch_offsets[epoch], plan.parent_steps, parent.epoch_offsets[epoch + 1]]
    )
    low, stop, high = parent.pack_offsets[
        parent.microbatch_offsets[steps * parent.num_microbatches]
    ]
    end = plan.pack_offsets[plan.microbatch_offsets[plan.epoch_offsets[1] * plan.num_microbatches]]
    before, after = parent.sequence_ids[low:stop], plan.sequence_ids[:end]
    times = np.bincount(parent.sequence_ids[low:high], minlength=len(parent.seq_lens))
    found = np.bincount(np.concatenate([before, after]), minlength=len(parent.seq_lens))
    if len(found) > len(times):
        return ["the plan names a sequence that its parent does not have"]
    problems = []
    for ids, what in (
        (np.flatnonzero(found < times), "lost"),
        (np.flatnonzero(found > times), "trained again"),
    ):
        if len(ids):
            problems.append(
                f"epoch {parent.first_epoch + epoch}: {len(ids)} sequences are {what} "
                f"{ids[:5].tolist()}"
            )
    return problems
