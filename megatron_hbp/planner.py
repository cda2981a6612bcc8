"""build_plan(): lengths and levels in, a Plan out. Pure: arrays and numbers, no files, no host.

Guarantees (asserted by tests/unit/test_planner.py):
- `build_plan(...).audit(seq_lens) == []`;
- every sequence is kept, truncated or dropped with a reason, as asked, and never silently;
- the same arguments give the same bytes, on any machine, thread or hash seed; int32 and int64
  lengths of equal values give the same plan.
"""

from collections.abc import Sequence

import numpy as np

from megatron_hbp.alignment import Alignment
from megatron_hbp.alignment import alignment as default_alignment
from megatron_hbp.audit import array_hash
from megatron_hbp.config import MIXING_MODES, OVERLONG_POLICIES, PACKERS
from megatron_hbp.level import Level, check_levels
from megatron_hbp.packing import check_lengths, make_rng, offsets_of
from megatron_hbp.plan import (
    DROP_EMPTY,
    DROP_OVERLONG,
    DROP_REASONS,
    DROP_UNTRAINABLE,
    Plan,
)
from megatron_hbp.schedule import Epoch, Shape, plan_epoch


def build_plan(
    seq_lens: np.ndarray,
    levels: Sequence[Level],
    num_ranks: int,
    num_microbatches: int = 1,
    num_stages: int = 1,
    *,
    epochs: int = 1,
    seed: int = 1234,
    packer: str = "best_fit",
    mixing: str = "auto",
    curriculum_steps: int = 0,
    overlong: str = "error",
    alignment: Alignment | None = None,
    first_trained: np.ndarray | None = None,
    source_ids: np.ndarray | None = None,
    corpus_hash: str | None = None,
    corpus_path: str | None = None,
) -> Plan:
    """Plans every step of every epoch.

    seq_lens: int32|int64 [n], tokens of each sequence. levels: ascending, one token budget.
    num_ranks: DP x CP size. num_microbatches: per step. num_stages: pipeline stages.
    packer, mixing, overlong: see HbpConfig. curriculum_steps: steps at the start with CP 1 only.
    alignment: multiples of lengths and budget (None: those of contiguous CP without FP8).
    first_trained: int32|int64 [n], index (1 or more) of the first token that is trained as a
    target, any value >= the length when there is none (None: not known, nothing is dropped for
    it). source_ids: int [n], the domain of each sequence, for the metrics.
    Raises ValueError for anything a user can get wrong, with the value, the rule and a way out.
    """
    levels = tuple(levels)
    check_levels(levels, num_ranks)
    _check_settings(
        num_microbatches=(num_microbatches, 1),
        num_stages=(num_stages, 1),
        epochs=(epochs, 1),
        seed=(seed, 0),
        curriculum_steps=(curriculum_steps, 0),
    )
    _check_choice("packer", packer, PACKERS)
    _check_choice("mixing", mixing, MIXING_MODES)
    _check_choice("overlong", overlong, OVERLONG_POLICIES)
    _check_arrays(seq_lens, first_trained, source_ids)
    cp_sizes = np.array([level.cp_size for level in levels], dtype=np.int64)
    if alignment is None:
        alignment = default_alignment(tuple(level.cp_size for level in levels))
    _check_alignment(alignment, levels)
    if mixing == "auto":
        mixing = "microbatch" if num_stages == 1 else "step"
    if curriculum_steps and not (cp_sizes == 1).any():
        raise ValueError(
            f"curriculum_steps is {curriculum_steps}, but no level has CP 1; use 0, or add the "
            f"level {levels[0].tokens_per_rank}:1"
        )
    shape = Shape(
        pack_lens=np.array([level.pack_len for level in levels], dtype=np.int64),
        cp_sizes=cp_sizes,
        multiples=np.array(alignment.document_multiples, dtype=np.int64),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        one_level=mixing == "step",
        alike=num_stages > 1,
    )
    kept_lens, reasons = _keep(seq_lens, first_trained, shape.longest(), overlong)
    dropped_ids = np.flatnonzero(reasons >= 0)
    tokens_in = int(seq_lens.sum(dtype=np.int64))
    tokens_dropped = int(seq_lens[dropped_ids].sum(dtype=np.int64))
    parts: list[Epoch] = []
    curriculum_left = curriculum_steps
    for epoch in range(epochs):
        part, early = plan_epoch(kept_lens, shape, packer, curriculum_left, make_rng([seed, epoch]))
        parts.append(part)
        curriculum_left -= early
        steps = len(part.levels) // num_microbatches
        if curriculum_left and (early < steps or epoch == epochs - 1):
            raise ValueError(
                f"curriculum_steps is {curriculum_steps}, but the plan starts with at most "
                f"{curriculum_steps - curriculum_left} steps of CP 1 levels only; use at most that"
            )
    steps_per_epoch = np.array([len(part.levels) for part in parts]) // num_microbatches
    small = len(seq_lens) < 2**31
    return Plan(
        levels=levels,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_stages=num_stages,
        seed=seed,
        packer=packer,
        mixing=mixing,
        curriculum_steps=curriculum_steps,
        overlong=overlong,
        alignment=alignment,
        tokens_in=tokens_in,
        tokens_dropped=tokens_dropped,
        tokens_truncated=tokens_in - tokens_dropped - int(kept_lens.sum()),
        seq_lens_hash=array_hash(seq_lens),
        first_trained_hash=None if first_trained is None else array_hash(first_trained),
        seq_lens=kept_lens.astype(np.int32 if shape.longest() < 2**31 else np.int64),
        sequence_ids=np.concatenate([part.packs.sequence_ids for part in parts]).astype(
            np.int32 if small else np.int64
        ),
        pack_offsets=offsets_of(np.concatenate([part.packs.counts() for part in parts])),
        microbatch_offsets=offsets_of(
            num_ranks // cp_sizes[np.concatenate([part.levels for part in parts])]
        ),
        microbatch_level=np.concatenate([part.levels for part in parts]).astype(np.int16),
        epoch_offsets=offsets_of(steps_per_epoch),
        dropped_ids=dropped_ids,
        dropped_reason=reasons[dropped_ids],
        truncated_ids=np.flatnonzero((reasons < 0) & (kept_lens < seq_lens)),
        source_ids=None if source_ids is None else source_ids.astype(np.int32),
        corpus_hash=corpus_hash,
        corpus_path=corpus_path,
    )


def _keep(
    seq_lens: np.ndarray, first_trained: np.ndarray | None, longest: int, overlong: str
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n] kept tokens, 0 if dropped, and int8 [n] reasons, -1 if kept."""
    if len(seq_lens) == 0:
        raise ValueError("there is no sequence to plan; give at least one length")
    too_long = seq_lens > longest
    if overlong == "error" and too_long.any():
        first = int(np.argmax(too_long))
        raise ValueError(
            f"sequence {first} has {seq_lens[first]} tokens, but the longest level holds "
            f"{longest}; {np.count_nonzero(too_long)} of {len(seq_lens)} sequences are over-long; "
            "add a longer level, or use --hbp-overlong drop or --hbp-overlong truncate"
        )
    kept = seq_lens.astype(np.int64)
    if overlong == "truncate":
        kept[too_long] = longest
    reasons = np.full(len(seq_lens), -1, dtype=np.int8)
    if first_trained is not None:
        reasons[first_trained >= kept] = DROP_UNTRAINABLE
    reasons[kept > longest] = DROP_OVERLONG
    reasons[kept == 0] = DROP_EMPTY
    kept[reasons >= 0] = 0
    if not kept.any():
        counts = ", ".join(
            f"{np.count_nonzero(reasons == code)} {reason}"
            for code, reason in enumerate(DROP_REASONS)
            if (reasons == code).any()
        )
        raise ValueError(
            f"all {len(seq_lens)} sequences are dropped ({counts}); nothing is left to train on"
        )
    return kept, reasons


def _check_settings(**settings: tuple[int, int]) -> None:
    for name, (value, least) in settings.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def _check_arrays(
    seq_lens: np.ndarray, first_trained: np.ndarray | None, source_ids: np.ndarray | None
) -> None:
    check_lengths(seq_lens, "seq_lens")
    if (seq_lens < 0).any():
        first = int(np.argmax(seq_lens < 0))
        raise ValueError(f"sequence {first} has {seq_lens[first]} tokens; it must have 0 or more")
    for name, array in (("first_trained", first_trained), ("source_ids", source_ids)):
        if array is None:
            continue
        check_lengths(array, name)
        if len(array) != len(seq_lens):
            raise ValueError(
                f"{name} has {len(array)} entries for {len(seq_lens)} sequences; it must have one "
                "for each"
            )
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
