"""build_plan(): lengths and levels in, a Plan out. Pure: arrays and numbers, no files, no host.

Guarantees (asserted by tests/unit/test_planner.py):
- `build_plan(...).audit(seq_lens) == []`;
- every sequence is kept, truncated or dropped with a reason, as asked, and never silently;
- the same arguments give the same bytes, on any machine, thread or hash seed; int32 and int64
  lengths of equal values give the same plan.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from megatron_hbp import _C
from megatron_hbp.alignment import Alignment
from megatron_hbp.alignment import alignment as default_alignment
from megatron_hbp.audit import array_hash
from megatron_hbp.config import MIXING_MODES, OVERLONG_POLICIES, PACKERS
from megatron_hbp.cost import PackCost
from megatron_hbp.level import Level, check_levels
from megatron_hbp.packing import MAX_CAPACITY, check_lengths, offsets_of
from megatron_hbp.plan import (
    DROP_EMPTY,
    DROP_OVERLONG,
    DROP_REASONS,
    DROP_UNTRAINABLE,
    DROP_WEIGHTLESS,
    Plan,
)
from megatron_hbp.randomness import mix_seed
from megatron_hbp.schedule import Epoch, Shape, plan_epoch
from megatron_hbp.weights import epoch_ids

# Sources beyond this many are one class where steps are mixed: those with the fewest tokens.
_MOST_SOURCE_CLASSES = 64


def build_plan(
    seq_lens: np.ndarray,
    levels: Sequence[Level],
    num_ranks: int,
    num_microbatches: int = 1,
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
    corpus_path: str | None = None,
) -> Plan:
    """Plans every step of every epoch.

    seq_lens: int32|int64 [n], tokens of each sequence. levels: ascending, one token budget.
    num_ranks: DP x CP size. num_microbatches: per step. num_stages: pipeline stages, each of
    num_virtual_stages model chunks. packer, mixing, max_mixing, overlong: see HbpConfig.
    curriculum_steps: steps at the start with CP 1 only. cost: what balances packs and predicts
    times (None: attention cost, and the times of a dense 8B model). alignment: multiples of lengths and
    budget (None: those of contiguous CP without FP8).
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
    _check_settings(
        num_microbatches=(num_microbatches, 1),
        num_stages=(num_stages, 1),
        num_virtual_stages=(num_virtual_stages, 1),
        epochs=(epochs, 1),
        seed=(seed, 0),
        curriculum_steps=(curriculum_steps, 0),
        max_mixing=(max_mixing, 0),
    )
    if num_virtual_stages > 1 and num_microbatches % num_stages:
        raise ValueError(
            f"{num_microbatches} micro-batches are no multiple of {num_stages} pipeline stages, "
            f"which virtual stages need; use {-(-num_microbatches // num_stages) * num_stages}"
        )
    _check_choice("packer", packer, PACKERS)
    _check_choice("mixing", mixing, MIXING_MODES)
    _check_choice("overlong", overlong, OVERLONG_POLICIES)
    _check_arrays(seq_lens, first_trained, source_ids)
    cp_sizes = np.array([level.cp_size for level in levels], dtype=np.int64)
    if alignment is None:
        alignment = default_alignment(tuple(level.cp_size for level in levels))
    _check_alignment(alignment, levels)
    if curriculum_steps and not (cp_sizes == 1).any():
        raise ValueError(
            f"curriculum_steps is {curriculum_steps}, but no level has CP 1; use 0, or add the "
            f"level {levels[0].tokens_per_rank}:1"
        )
    weights = _check_weights(source_weights, source_ids)
    source_of, num_sources = _source_classes(seq_lens, source_ids)
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
        kept = _keep(
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
            steps = len(part.levels) // num_microbatches
            if curriculum_left and (early < steps or epoch == epochs - 1):
                raise ValueError(
                    f"curriculum_steps is {curriculum_steps}, but the plan starts with at most "
                    f"{curriculum_steps - curriculum_left} steps of CP 1 levels only; use at most "
                    "that"
                )
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
            seq_lens=kept.lens,
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
            corpus_path=corpus_path,
        )


@dataclass(frozen=True)
class _Kept:
    """lens: int32 [n], tokens kept of each sequence, 0 if dropped; the others as in Plan."""

    lens: np.ndarray
    dropped_ids: np.ndarray
    dropped_reason: np.ndarray
    truncated_ids: np.ndarray
    tokens_in: int
    tokens_dropped: int
    tokens_truncated: int


def _keep(
    seq_lens: np.ndarray,
    *,
    first_trained: np.ndarray | None,
    source_ids: np.ndarray | None,
    weights: tuple[float, ...] | None,
    longest: int,
    overlong: str,
) -> _Kept:
    if len(seq_lens) == 0:
        raise ValueError("there is no sequence to plan; give at least one length")
    least, most, tokens_in = _C.survey(seq_lens)
    if least < 0:
        first = int(np.argmax(seq_lens < 0))
        raise ValueError(f"sequence {first} has {seq_lens[first]} tokens; it must have 0 or more")
    if most > longest and overlong == "error":
        too_long = np.flatnonzero(seq_lens > longest)
        raise ValueError(
            f"sequence {too_long[0]} has {seq_lens[too_long[0]]} tokens, but the longest level "
            f"holds {longest}; {len(too_long)} of {len(seq_lens)} sequences are over-long; "
            "add a longer level, or use --hbp-overlong drop or --hbp-overlong truncate"
        )
    truncated = np.empty(0, dtype=np.int64)
    if most > longest and overlong == "truncate":
        truncated = np.flatnonzero(seq_lens > longest)
        seq_lens = np.minimum(seq_lens, longest)
        most = longest
    reasons = {}  # code: ids, the first reason that applies is the one that counts
    if least == 0:
        reasons[DROP_EMPTY] = np.flatnonzero(seq_lens == 0)
    if most > longest:
        reasons[DROP_OVERLONG] = np.flatnonzero(seq_lens > longest)
    if first_trained is not None:
        reasons[DROP_UNTRAINABLE] = np.flatnonzero(first_trained >= seq_lens)
    if weights is not None and source_ids is not None:
        reasons[DROP_WEIGHTLESS] = np.flatnonzero(np.array(weights)[source_ids] == 0)
    dropped, code_at = np.unique(
        np.concatenate([np.empty(0, dtype=np.int64), *reasons.values()]), return_index=True
    )
    codes = np.repeat(list(reasons), [len(ids) for ids in reasons.values()])[code_at]
    if len(dropped) == len(seq_lens):
        counts = ", ".join(
            f"{np.count_nonzero(codes == code)} {reason}"
            for code, reason in enumerate(DROP_REASONS)
            if (codes == code).any()
        )
        raise ValueError(
            f"all {len(seq_lens)} sequences are dropped ({counts}); nothing is left to train on"
        )
    lens = seq_lens.astype(np.int32)
    lens[dropped] = 0
    tokens_dropped = int(seq_lens[dropped].sum(dtype=np.int64))
    return _Kept(
        lens=lens,
        dropped_ids=dropped,
        dropped_reason=codes.astype(np.int8),
        truncated_ids=np.setdiff1d(truncated, dropped, assume_unique=True),
        tokens_in=tokens_in,
        tokens_dropped=tokens_dropped,
        tokens_truncated=tokens_in - tokens_dropped - int(lens.sum(dtype=np.int64)),
    )


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """The arrays one after another, without a copy of a single one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _source_classes(
    seq_lens: np.ndarray, source_ids: np.ndarray | None
) -> tuple[np.ndarray | None, int]:
    """int32 [n] classes to mix by and how many: the largest sources, the others as one."""
    if source_ids is None or len(source_ids) == 0:
        return None, 0
    names, classes = np.unique(source_ids, return_inverse=True)
    if len(names) > _MOST_SOURCE_CLASSES:
        tokens = np.bincount(classes, weights=seq_lens)
        rank = np.empty(len(names), dtype=np.int64)
        rank[np.argsort(-tokens, kind="stable")] = np.arange(len(names))
        classes = np.minimum(rank, _MOST_SOURCE_CLASSES - 1)[classes]
    return classes.astype(np.int32), min(len(names), _MOST_SOURCE_CLASSES)


def _check_weights(
    source_weights: Sequence[float] | None, source_ids: np.ndarray | None
) -> tuple[float, ...] | None:
    if source_weights is None:
        return None
    weights = tuple(float(weight) for weight in source_weights)
    if source_ids is None:
        raise ValueError("source_weights need source_ids; give the source of each sequence")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"source_weights are {weights}; each must be a finite number of 0 or more")
    most = int(source_ids.max(initial=-1))
    if most >= len(weights):
        raise ValueError(
            f"source {most} has no weight: {len(weights)} source_weights are given; give one for "
            "each source, 0 to leave it out"
        )
    return weights


def _check_settings(**settings: tuple[float, int]) -> None:
    for name, (value, least) in settings.items():
        if not value >= least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def _check_arrays(
    seq_lens: np.ndarray, first_trained: np.ndarray | None, source_ids: np.ndarray | None
) -> None:
    check_lengths(seq_lens, "seq_lens")
    for name, array in (("first_trained", first_trained), ("source_ids", source_ids)):
        if array is None:
            continue
        check_lengths(array, name)
        if len(array) != len(seq_lens):
            raise ValueError(
                f"{name} has {len(array)} entries for {len(seq_lens)} sequences; it must have one "
                "for each"
            )
    if source_ids is not None and (source_ids < 0).any():
        first = int(np.argmax(source_ids < 0))
        raise ValueError(f"source_ids of sequence {first} is {source_ids[first]}; it must be >= 0")
    if first_trained is not None and (first_trained < 1).any():
        first = int(np.argmax(first_trained < 1))
        raise ValueError(
            f"first_trained of sequence {first} is {first_trained[first]}; it must be at least 1, "
            "because the first token is never a target"
        )


def _check_alignment(alignment: Alignment, levels: tuple[Level, ...]) -> None:
    if len(alignment.document_multiples) != len(levels):
        raise ValueError(
            f"the alignment has {len(alignment.document_multiples)} document multiples for "
            f"{len(levels)} levels; make it with alignment() from the CP sizes of the levels"
        )
    budget, multiple = levels[0].tokens_per_rank, alignment.budget_multiple
    if budget % multiple:
        below = budget // multiple * multiple
        raise ValueError(
            f"the token budget S is {budget}, but it must be a multiple of {multiple} (sequence "
            f"parallelism x FP8 recipe); use S = {below or multiple} or {below + multiple}"
        )
