"""Loss normalizers: the weight of each token's loss, from the plan alone.

The host sums weight x loss over a step and divides by the step's trained tokens T. So a normalizer
that is not the plain token average multiplies its weights by T. Formulas (l = token loss, paper
section 4):
- ave-token:   sum(l) / T
- sample-mean: mean over the step's sequences of (mean of l over the sequence's trained tokens)
- token-mean:  mean over ranks and micro-batches of (mean of l over the pack's trained tokens); a
  pack of CP size c counts for its c ranks, packs without trained tokens do not count
- sum:         sum(l)
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_hbp.plan import Plan


class Masks(Protocol):
    """What of a corpus tells how many tokens are trained."""

    @property
    def num_trained(self) -> np.ndarray: ...

    def mask(self, index: int, length: int | None = None) -> np.ndarray: ...


def kept_trained(plan: Plan, corpus: Masks) -> np.ndarray:
    """int32 [num_sequences]: trained tokens after truncation, 0 for dropped sequences."""
    kept = np.where(plan.seq_lens > 0, corpus.num_trained, 0)
    for sequence in plan.truncated_ids:
        mask = corpus.mask(int(sequence), int(plan.seq_lens[sequence]))
        kept[sequence] = np.count_nonzero(mask[1:])
    return kept


@dataclass(frozen=True)
class StepTotals:
    """Per step: trained and real tokens, sequences, and ranks x micro-batches with trained tokens.

    All int64 [num_steps].
    """

    trained_tokens: np.ndarray
    real_tokens: np.ndarray
    sequences: np.ndarray
    trained_slots: np.ndarray
    pack_trained_tokens: np.ndarray  # int64 [num_packs]


def step_totals(plan: Plan, num_trained: np.ndarray) -> StepTotals:
    """num_trained: int [num_sequences], trained tokens of each kept sequence."""
    trained_ends = _ends(num_trained[plan.sequence_ids])
    real_ends = _ends(plan.seq_lens[plan.sequence_ids])
    pack_trained = np.diff(trained_ends[plan.pack_offsets])
    cp_sizes = np.array([level.cp_size for level in plan.levels], dtype=np.int64)
    slots = np.where(pack_trained > 0, cp_sizes[plan.pack_level()], 0)
    first_pack = plan.microbatch_offsets[:: plan.num_microbatches]
    first_sequence = plan.pack_offsets[first_pack]
    return StepTotals(
        trained_tokens=np.diff(trained_ends[first_sequence]),
        real_tokens=np.diff(real_ends[first_sequence]),
        sequences=np.diff(first_sequence),
        trained_slots=np.diff(_ends(slots)[first_pack]),
        pack_trained_tokens=pack_trained,
    )


def sequence_weights(
    normalizer: str,
    *,
    sequence_trained: np.ndarray,
    step_trained: int,
    step_sequences: int,
    step_slots: int,
    pack_trained: int,
    cp_size: int,
) -> np.ndarray:
    """float64 [sequences in the pack]: the weight of each trained token of each sequence.

    sequence_trained: int64, trained tokens per sequence of the pack. The other numbers are totals
    of the step and of the pack.
    """
    ones = np.ones(len(sequence_trained), dtype=np.float64)
    if normalizer == "ave-token":
        return ones
    if normalizer == "sum":
        return ones * step_trained
    if normalizer == "sample-mean":
        return step_trained / (step_sequences * np.maximum(sequence_trained, 1.0))
    if normalizer == "token-mean":
        return ones * (step_trained * cp_size / (step_slots * max(pack_trained, 1)))
    raise ValueError(f"loss normalizer {normalizer!r} is unknown")


def _ends(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
