"""What build_plan() and replan() share: the checked shape of a plan, and the arrays of its epochs.

Guarantees (asserted by tests/unit/test_planner.py and tests/unit/test_replan.py):
- a shape that no run can have is refused, with the value, the rule and a way out;
- an epoch's packs and order depend on its number in the whole run, not on its place in a plan.
"""

from collections.abc import Callable
from typing import TypedDict

import numpy as np

from megatron_hbp.alignment import Alignment
from megatron_hbp.config import MIXING_MODES
from megatron_hbp.cost import PackCost
from megatron_hbp.level import Level, check_levels
from megatron_hbp.packing import MAX_CAPACITY, offsets_of
from megatron_hbp.plan_inputs import check_alignment, check_choice, check_settings
from megatron_hbp.randomness import mix_seed
from megatron_hbp.schedule import Epoch, Shape, plan_epoch


class PlannedArrays(TypedDict):
    """The arrays of Plan that say what is trained when."""

    sequence_ids: np.ndarray
    pack_offsets: np.ndarray
    microbatch_offsets: np.ndarray
    microbatch_level: np.ndarray
    epoch_offsets: np.ndarray


def checked_shape(
    levels: tuple[Level, ...],
    *,
    num_ranks: int,
    num_microbatches: int | None,
    num_stages: int,
    num_virtual_stages: int,
    mixing: str,
    max_mixing: float,
    curriculum_steps: int,
    cost: PackCost | None,
    alignment: Alignment,
    sources: tuple[np.ndarray | None, int],
) -> Shape:
    """The shape of every epoch. Arguments as in build_plan(); sources: see source_classes().

    Raises ValueError for what no run can have.
    """
    check_levels(levels, num_ranks)
    if levels[-1].pack_len > MAX_CAPACITY:
        raise ValueError(
            f"level {levels[-1]} is longer than {MAX_CAPACITY} tokens; use shorter levels"
        )
    check_settings(
        num_microbatches=(1 if num_microbatches is None else num_microbatches, 1),
        num_stages=(num_stages, 1),
        num_virtual_stages=(num_virtual_stages, 1),
        curriculum_steps=(curriculum_steps, 0),
        max_mixing=(max_mixing, 0),
    )
    if num_microbatches and num_virtual_stages > 1 and num_microbatches % num_stages:
        raise ValueError(
            f"{num_microbatches} micro-batches are no multiple of {num_stages} pipeline stages, "
            f"which virtual stages need; use {-(-num_microbatches // num_stages) * num_stages}"
        )
    check_choice("mixing", mixing, MIXING_MODES)
    check_alignment(alignment, levels)
    cp_sizes = np.array([level.cp_size for level in levels], dtype=np.int64)
    if curriculum_steps and not (cp_sizes == 1).any():
        raise ValueError(
            f"curriculum_steps is {curriculum_steps}, but no level has CP 1; use 0, or add the "
            f"level {levels[0].tokens_per_rank}:1"
        )
    return Shape(
        pack_lens=np.array([level.pack_len for level in levels], dtype=np.int64),
        cp_sizes=cp_sizes,
        multiples=np.array(alignment.document_multiples, dtype=np.int64),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_stages=num_stages,
        num_virtual_stages=num_virtual_stages,
        one_level=mixing == "step",
        alike=num_stages > 1 and mixing != "microbatch",
        max_mixing=max_mixing,
        cost=cost,
        source_of=sources[0],
        num_sources=sources[1],
    )


def planned_arrays(
    seq_lens: np.ndarray,
    shape: Shape,
    epochs: range,
    *,
    chosen: Callable[[int], np.ndarray | None],
    packer: str,
    curriculum_steps: int,
    seed: int,
) -> PlannedArrays:
    """Plans the epochs one after another.

    seq_lens: int32|int64 [n], kept tokens, 0 for a dropped sequence. epochs: their numbers in the
    whole run. chosen: the ids of an epoch, repeats allowed (None: each kept sequence once). Raises
    ValueError when there are not enough steps of CP 1 levels for the curriculum.
    """
    parts: list[Epoch] = []
    curriculum_left = curriculum_steps
    for epoch in epochs:
        part, early = plan_epoch(
            seq_lens,
            shape,
            packer=packer,
            curriculum_steps=curriculum_left,
            seed=mix_seed(seed, epoch),
            chosen=chosen(epoch),
        )
        parts.append(part)
        curriculum_left -= early
        steps = len(part.levels) // (shape.num_microbatches or 1)
        if curriculum_left and (early < steps or epoch == epochs[-1]):
            raise ValueError(
                f"curriculum_steps is {curriculum_steps}, but the plan starts with at most "
                f"{curriculum_steps - curriculum_left} steps of CP 1 levels only; use at most that"
            )
    num_microbatches = shape.num_microbatches or len(parts[0].levels)
    levels = _joined([part.levels for part in parts])
    return PlannedArrays(
        sequence_ids=_joined([part.sequence_ids for part in parts]),
        pack_offsets=offsets_of(_joined([part.pack_counts for part in parts])),
        microbatch_offsets=offsets_of(shape.replicas()[levels]),
        microbatch_level=levels.astype(np.int16),
        epoch_offsets=offsets_of(
            np.array([len(part.levels) for part in parts]) // num_microbatches
        ),
    )


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """The arrays one after another, without a copy of a single one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
