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
from megatron_hbp.config import OVERLONG_POLICIES, PACKERS
from megatron_hbp.cost import PackCost
from megatron_hbp.kept import keep
from megatron_hbp.layout import checked_shape, planned_arrays
from megatron_hbp.level import Level
from megatron_hbp.mixing import source_classes
from megatron_hbp.plan import Plan
from megatron_hbp.plan_inputs import check_arrays, check_choice, check_settings, check_weights
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
    check_settings(epochs=(epochs, 1), seed=(seed, 0))
    if num_microbatches is None and (
        num_stages > 1 or epochs > 1 or mixing == "step" or curriculum_steps
    ):
        raise ValueError(
            "a single step (num_microbatches None) has one stage, one epoch, no curriculum and "
            "micro-batches of all levels; give num_microbatches, or leave the others out"
        )
    check_choice("packer", packer, PACKERS)
    check_choice("overlong", overlong, OVERLONG_POLICIES)
    check_arrays(seq_lens, first_trained, source_ids)
    if alignment is None:
        alignment = default_alignment(tuple(level.cp_size for level in levels))
    weights = check_weights(source_weights, source_ids)
    shape = checked_shape(
        levels,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_stages=num_stages,
        num_virtual_stages=num_virtual_stages,
        mixing=mixing,
        max_mixing=max_mixing,
        curriculum_steps=curriculum_steps,
        cost=cost,
        alignment=alignment,
        sources=source_classes(seq_lens, source_ids),
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
        arrays = planned_arrays(
            kept.lens,
            shape,
            range(epochs),
            chosen=lambda epoch: (
                None
                if weights is None or source_ids is None
                else epoch_ids(kept.lens, source_ids, weights, seed, epoch)
            ),
            packer=packer,
            curriculum_steps=curriculum_steps,
            seed=seed,
        )
        return Plan(
            levels=levels,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches or len(arrays["microbatch_level"]),
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
            dropped_ids=kept.dropped_ids,
            dropped_reason=kept.dropped_reason,
            truncated_ids=kept.truncated_ids,
            source_ids=None if source_ids is None else source_ids.astype(np.int32),
            source_weights=weights,
            corpus_hash=corpus_hash,
            corpus_paths=tuple(corpus_paths),
            alike=shape.alike,
            **arrays,
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
