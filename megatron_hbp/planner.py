"""build_plan(): lengths and levels in, a Plan out. Pure: arrays and numbers, no files, no host.

Guarantees (asserted by tests/unit/test_planner.py):
- `build_plan(...).audit(seq_lens) == []`;
- every sequence is kept, truncated or dropped with a reason, as asked, and never silently;
- the same arguments give the same bytes, on any machine, thread or hash seed; int32 and int64
  lengths of equal values give the same plan.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from megatron_hbp.alignment import Alignment
from megatron_hbp.alignment import alignment as default_alignment
from megatron_hbp.audit import array_hash
from megatron_hbp.config import MIXING_MODES, OVERLONG_POLICIES, PACKERS
from megatron_hbp.cost import PackCost
from megatron_hbp.kept import keep
from megatron_hbp.level import Level, check_levels
from megatron_hbp.mixing import source_classes
from megatron_hbp.packing import MAX_CAPACITY, offsets_of
from megatron_hbp.plan import Plan
from megatron_hbp.plan_inputs import (
    check_alignment,
    check_arrays,
    check_choice,
    check_settings,
    check_weights,
)
from megatron_hbp.randomness import mix_seed
from megatron_hbp.schedule import Epoch, Shape, plan_epoch
from megatron_hbp.weights import epoch_ids


def build_plan(
    seq_lens: np.ndarray,
    levels: Sequence[Level],
    num_ranks: int,
    num_microbatches: int | None = 1,
    num_stages: int = 1,
    *,
    num_virtual_stages: int = 1,
    epochs: int = 1,
    seed: int = 1234,
    packer: str = "best_fit",
    mixing: str = "auto",
    max_mixing: float = 0.0,
    curriculum_steps: int = 0,
    overlong: str = "error",
    cost: PackCost | None = None,
    alignment: Alignment | None = None,
    first_trained: np.ndarray | None = None,
    source_ids: np.ndarray | None = None,
    source_weights: Sequence[float] | None = None,
    corpus_hash: str | None = None,
    corpus_paths: Sequence[str] = (),
) -> Plan:
    """Plans every step of every epoch.

    seq_lens: int32|int64 [n], tokens of each sequence. levels: ascending, one token budget.
    num_ranks: DP x CP size. num_microbatches: per step (None: see plan_batch). num_stages: pipeline
    stages, each of num_virtual_stages model chunks. packer, mixing, max_mixing, overlong: see
    HbpConfig. curriculum_steps: steps at the start with CP 1 only. cost: what balances packs and
    predicts times (None: attention cost, and the times of a dense 8B model). alignment: multiples
    of lengths and budget (None: those of contiguous CP without FP8).
    first_trained: int32|int64 [n], index (1 or more) of the first token that is trained as a
    target, any value >= the length when there is none (None: not known, nothing is dropped for
    it). source_ids: int32|int64 [n], 0 or more, the domain of each sequence: steps are mixed by it
    too. source_weights: how often an epoch takes each sequence of source 0, 1, ... (weights.py).
    Raises ValueError for anything a user can get wrong, with the value, the rule and a way out.
    """
    levels = tuple(levels)
    check_levels(levels, num_ranks)
    if levels[-1].pack_len > MAX_CAPACITY:
        raise ValueError(
            f"level {levels[-1]} is longer than {MAX_CAPACITY} tokens; use shorter levels"
        )
    check_settings(
        num_microbatches=(1 if num_microbatches is None else num_microbatches, 1),
        num_stages=(num_stages, 1),
        num_virtual_stages=(num_virtual_stages, 1),
        epochs=(epochs, 1),
        seed=(seed, 0),
        curriculum_steps=(curriculum_steps, 0),
        max_mixing=(max_mixing, 0),
    )
    if num_microbatches is None:
        if num_stages > 1 or epochs > 1 or mixing == "step" or curriculum_steps:
            raise ValueError(
                "a single step (num_microbatches None) has one stage, one epoch, no curriculum and "
                "micro-batches of all levels; give num_microbatches, or leave the others out"
            )
    elif num_virtual_stages > 1 and num_microbatches % num_stages:
        raise ValueError(
            f"{num_microbatches} micro-batches are no multiple of {num_stages} pipeline stages, "
            f"which virtual stages need; use {-(-num_microbatches // num_stages) * num_stages}"
        )
    check_choice("packer", packer, PACKERS)
    check_choice("mixing", mixing, MIXING_MODES)
    check_choice("overlong", overlong, OVERLONG_POLICIES)
    check_arrays(seq_lens, first_trained, source_ids)
    cp_sizes = np.array([level.cp_size for level in levels], dtype=np.int64)
    if alignment is None:
        alignment = default_alignment(tuple(level.cp_size for level in levels))
    check_alignment(alignment, levels)
    if curriculum_steps and not (cp_sizes == 1).any():
        raise ValueError(
            f"curriculum_steps is {curriculum_steps}, but no level has CP 1; use 0, or add the "
            f"level {levels[0].tokens_per_rank}:1"
        )
    weights = check_weights(source_weights, source_ids)
    source_of, num_sources = source_classes(seq_lens, source_ids)
    shape = Shape(
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
        source_of=source_of,
        num_sources=num_sources,
    )
    with ThreadPoolExecutor(1) as second_core:
        seq_lens_hash = second_core.submit(array_hash, seq_lens)
        kept = keep(
            seq_lens,
            first_trained=first_trained,
            source_ids=source_ids,
            weights=weights,
            longest=shape.longest(),
            overlong=overlong,
        )
        parts: list[Epoch] = []
        curriculum_left = curriculum_steps
        for epoch in range(epochs):
            chosen = None
            if weights is not None and source_ids is not None:
                chosen = epoch_ids(kept.lens, source_ids, weights, seed, epoch)
            part, early = plan_epoch(
                kept.lens,
                shape,
                packer=packer,
                curriculum_steps=curriculum_left,
                seed=mix_seed(seed, epoch),
                chosen=chosen,
            )
            parts.append(part)
            curriculum_left -= early
            steps = len(part.levels) // (num_microbatches or 1)
            if curriculum_left and (early < steps or epoch == epochs - 1):
                raise ValueError(
                    f"curriculum_steps is {curriculum_steps}, but the plan starts with at most "
                    f"{curriculum_steps - curriculum_left} steps of CP 1 levels only; use at most "
                    "that"
                )
        num_microbatches = num_microbatches or len(parts[0].levels)
        return Plan(
            levels=levels,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_stages=num_stages,
            num_virtual_stages=num_virtual_stages,
            seed=seed,
            packer=packer,
            mixing="microbatch" if mixing == "auto" else mixing,
            max_mixing=float(max_mixing),
            curriculum_steps=curriculum_steps,
            overlong=overlong,
            cost=cost,
            alignment=alignment,
            tokens_in=kept.tokens_in,
            tokens_dropped=kept.tokens_dropped,
            tokens_truncated=kept.tokens_truncated,
            seq_lens_hash=seq_lens_hash.result(),
            first_trained_hash=None if first_trained is None else array_hash(first_trained),
            seq_lens=np.array(kept.lens, dtype=np.int32),
            sequence_ids=_joined([part.sequence_ids for part in parts]),
            pack_offsets=offsets_of(_joined([part.pack_counts for part in parts])),
            microbatch_offsets=offsets_of(
                shape.replicas()[_joined([part.levels for part in parts])]
            ),
            microbatch_level=_joined([part.levels for part in parts]).astype(np.int16),
            epoch_offsets=offsets_of(
                np.array([len(part.levels) for part in parts]) // num_microbatches
            ),
            dropped_ids=kept.dropped_ids,
            dropped_reason=kept.dropped_reason,
            truncated_ids=kept.truncated_ids,
            source_ids=None if source_ids is None else source_ids.astype(np.int32),
            source_weights=weights,
            corpus_hash=corpus_hash,
            corpus_paths=tuple(corpus_paths),
        )


def plan_batch(
    seq_lens: np.ndarray,
    levels: Sequence[Level],
    num_ranks: int,
    *,
    seed: int = 1234,
    packer: str = "best_fit",
    overlong: str = "error",
    cost: PackCost | None = None,
    alignment: Alignment | None = None,
    first_trained: np.ndarray | None = None,
) -> Plan:
    """Plans one global batch, for reinforcement learning: a plan of one step and one epoch.

    Every rank gets the same number of micro-batches, as few as the sequences allow; each sequence
    is in one pack and no pack is over its level's pack_len. Ranks do about equally much over the
    whole batch, and in each micro-batch. Arguments as in build_plan().
    """
    return build_plan(
        seq_lens,
        levels,
        num_ranks,
        None,
        seed=seed,
        packer=packer,
        overlong=overlong,
        cost=cost,
        alignment=alignment,
        first_trained=first_trained,
    )


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """The arrays one after another, without a copy of a single one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
