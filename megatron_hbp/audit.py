"""Every invariant of a plan (docs/design.md), checked on its arrays alone.

Guarantees (asserted by tests/unit/test_plan.py): a violation of any invariant is found, damaged
arrays are reported and never crash the audit.
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from megatron_hbp.level import check_levels
from megatron_hbp.weights import epoch_ids

if TYPE_CHECKING:
    from megatron_hbp.plan import Plan


_HASHED_AT_ONCE = 2**20  # values, so that no copy of a whole array is made


def audit_plan(plan: "Plan", seq_lens: np.ndarray | None = None) -> list[str]:
    """The violations in words, none when the plan is good: see `Plan.audit`."""
    problems = _shape_problems(plan)
    if problems:
        return problems
    return _layout_problems(plan) + _content_problems(plan) + _account_problems(plan, seq_lens)


def array_hash(array: np.ndarray) -> str:
    """SHA-256 of integer values: equal for int32 and int64 arrays of equal values.

    Values that fit are hashed as int32, half the bytes of int64.
    """
    small = len(array) == 0 or (array.min() >= -(2**31) and array.max() < 2**31)
    digest = hashlib.sha256()
    for first in range(0, len(array), _HASHED_AT_ONCE):
        part = array[first : first + _HASHED_AT_ONCE]
        digest.update(np.ascontiguousarray(part, dtype="<i4" if small else "<i8").data)
    return digest.hexdigest()


def _shape_problems(plan: "Plan") -> list[str]:
    problems = []
    try:
        check_levels(plan.levels, plan.num_ranks)
    except ValueError as error:
        problems.append(str(error))
    offsets_into = {
        "pack_offsets": len(plan.sequence_ids),
        "microbatch_offsets": len(plan.pack_offsets) - 1,
        "epoch_offsets": len(plan.microbatch_level) // max(1, plan.num_microbatches),
    }
    for name, end in offsets_into.items():
        offsets = getattr(plan, name)
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != end:
            problems.append(f"{name} does not run from 0 to {end}")
        elif (np.diff(offsets) < 0).any():
            problems.append(f"{name} decreases at entry {int(np.argmax(np.diff(offsets) < 0)) + 1}")
    if len(plan.microbatch_level) != len(plan.microbatch_offsets) - 1:
        problems.append("microbatch_level and microbatch_offsets differ in length")
    elif len(plan.microbatch_level) % plan.num_microbatches:
        problems.append(
            f"{len(plan.microbatch_level)} micro-batches are not whole steps of "
            f"{plan.num_microbatches}"
        )
    if ((plan.microbatch_level < 0) | (plan.microbatch_level >= len(plan.levels))).any():
        problems.append("a micro-batch names a level that does not exist")
    ids = plan.sequence_ids
    if len(ids) and (ids.min() < 0 or ids.max() >= len(plan.seq_lens)):
        problems.append("sequence_ids names a sequence that does not exist")
    if len(plan.dropped_ids) != len(plan.dropped_reason):
        problems.append("dropped_ids and dropped_reason differ in length")
    return problems


def _layout_problems(plan: "Plan") -> list[str]:
    problems = []
    cp_sizes = np.array([level.cp_size for level in plan.levels], dtype=np.int64)
    packs_per_microbatch = np.diff(plan.microbatch_offsets)
    wanted = plan.num_ranks // cp_sizes[plan.microbatch_level]
    for index in np.flatnonzero(packs_per_microbatch != wanted)[:5]:
        problems.append(
            f"micro-batch {index} has {packs_per_microbatch[index]} packs, its level needs "
            f"{wanted[index]}"
        )
    by_step = plan.microbatch_level.reshape(-1, plan.num_microbatches)
    if plan.mixing == "step":
        for index in np.flatnonzero((by_step != by_step[:, :1]).any(axis=1))[:5]:
            problems.append(f"step {index} mixes levels although mixing is 'step'")
    early = by_step[: plan.curriculum_steps]
    if (cp_sizes[early] > 1).any():
        problems.append("a curriculum step trains a level with CP above 1")
    return problems


def _content_problems(plan: "Plan") -> list[str]:
    problems = []
    multiples = np.array(plan.alignment.document_multiples, dtype=np.int64)
    pack_lens = np.array([level.pack_len for level in plan.levels], dtype=np.int64)
    pack_level = plan.pack_level()
    lens = plan.seq_lens[plan.sequence_ids].astype(np.int64)
    counts = np.diff(plan.pack_offsets)
    multiple = np.repeat(multiples[pack_level], counts)
    aligned = -(-lens // multiple) * multiple
    ends = np.concatenate([[0], np.cumsum(aligned)])
    loads = ends[plan.pack_offsets[1:]] - ends[plan.pack_offsets[:-1]]
    for index in np.flatnonzero(loads > pack_lens[pack_level])[:5]:
        problems.append(
            f"pack {index} holds {loads[index]} tokens, its level allows "
            f"{pack_lens[pack_level[index]]}"
        )
    if (lens == 0).any():
        problems.append("a pack holds a dropped or empty sequence")
    kept = np.flatnonzero(plan.seq_lens)
    steps = plan.epoch_offsets * plan.num_microbatches
    first_sequence = plan.pack_offsets[plan.microbatch_offsets[steps]]
    for epoch in range(plan.epochs):
        ids = np.sort(plan.sequence_ids[first_sequence[epoch] : first_sequence[epoch + 1]])
        wanted = _epoch_ids(plan, kept, epoch)
        if not np.array_equal(ids, wanted):
            missing = np.setdiff1d(wanted, ids)
            repeated = ids[1:][ids[1:] == ids[:-1]]
            problems.append(
                f"epoch {epoch}: {len(missing)} kept sequences are in no pack "
                f"{missing[:5].tolist()}, {len(repeated)} are repeated {repeated[:5].tolist()}"
            )
    per_step = np.diff(
        plan.pack_offsets[plan.microbatch_offsets[:: plan.num_microbatches]]
        if plan.num_steps
        else np.zeros(1, dtype=np.int64)
    )
    for index in np.flatnonzero(per_step == 0)[:5]:
        problems.append(f"step {index} holds only fillers: it has no trained token")
    return problems


def _epoch_ids(plan: "Plan", kept: np.ndarray, epoch: int) -> np.ndarray:
    """The ids that an epoch of the plan must train, ascending, each as often as it must."""
    if epoch == 0 and plan.carried_ids is not None:
        return plan.carried_ids
    if plan.source_weights is None or plan.source_ids is None:
        return kept
    number = plan.first_epoch + epoch
    return epoch_ids(plan.seq_lens, plan.source_ids, plan.source_weights, plan.seed, number)


def _account_problems(plan: "Plan", seq_lens: np.ndarray | None) -> list[str]:
    problems = []
    kept = int(plan.seq_lens.sum(dtype=np.int64))
    if plan.tokens_in != kept + plan.tokens_dropped + plan.tokens_truncated:
        problems.append(
            f"tokens in {plan.tokens_in} != kept {kept} + dropped {plan.tokens_dropped} + "
            f"truncated {plan.tokens_truncated}"
        )
    if not np.array_equal(plan.dropped_ids, np.flatnonzero(plan.seq_lens == 0)):
        problems.append("dropped_ids are not exactly the sequences without kept tokens")
        return problems
    if seq_lens is None:
        return problems
    if len(seq_lens) != len(plan.seq_lens) or array_hash(seq_lens) != plan.seq_lens_hash:
        problems.append("the plan was made from other lengths (seq_lens_hash differs)")
        return problems
    dropped = int(seq_lens[plan.dropped_ids].sum(dtype=np.int64))
    cut = seq_lens.astype(np.int64) - plan.seq_lens
    cut[plan.dropped_ids] = 0
    if dropped != plan.tokens_dropped or int(cut.sum()) != plan.tokens_truncated:
        problems.append("tokens_dropped or tokens_truncated does not match the input lengths")
    if not np.array_equal(plan.truncated_ids, np.flatnonzero(cut)):
        problems.append("truncated_ids are not exactly the sequences that lost tokens")
    return problems
