"""The lengths of a corpus as a histogram: sums over ranges of lengths, and the packs they need.

Guarantees (asserted by tests/unit/test_histogram.py):
- sums are exact;
- packs_needed() is a lower bound of every packing.
Once it is made, no cost depends on the number of sequences.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hbp.packing import check_lengths

# how many ways of calling a sequence long packs_needed() tries
_MAX_TRIES = 16


@dataclass(frozen=True)
class Sums:
    """Of some sequences: how many, their tokens, the sum of their squared lengths."""

    sequences: float
    tokens: float
    squares: float

    def times(self, factor: float) -> "Sums":
        return Sums(self.sequences * factor, self.tokens * factor, self.squares * factor)


class LengthHistogram:
    """The distinct lengths of some sequences and how often each occurs.

    seq_lens: int32|int64 [n], tokens; lengths of 0 are left out, as the planner drops them. Raises
    ValueError for another array, a negative length, or when no sequence has a token.
    """

    def __init__(self, seq_lens: np.ndarray) -> None:
        check_lengths(seq_lens, "seq_lens")
        lengths, counts = np.unique(seq_lens, return_counts=True)
        if len(lengths) and lengths[0] < 0:
            raise ValueError(f"seq_lens holds a length of {lengths[0]}; lengths are 0 or more")
        used = lengths > 0
        if not used.any():
            raise ValueError(
                f"none of the {len(seq_lens)} sequences has a token; give the lengths of the "
                "corpus that is to be trained"
            )
        self.lengths = lengths[used].astype(np.int64)
        self.counts = counts[used].astype(np.int64)
        weights = np.stack([np.ones_like(self.lengths), self.lengths, self.lengths * self.lengths])
        self._ends = np.zeros((3, len(self.lengths) + 1), dtype=np.int64)
        np.cumsum(weights * self.counts, axis=1, out=self._ends[:, 1:])

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths[-1])

    @property
    def num_sequences(self) -> int:
        return int(self._ends[0, -1])

    @property
    def num_tokens(self) -> int:
        return int(self._ends[1, -1])

    def between(self, above: int, up_to: int) -> Sums:
        """Of the sequences of more than `above` and at most `up_to` tokens."""
        first, last = np.searchsorted(self.lengths, [above, up_to], side="right")
        return Sums(*(self._ends[:, max(first, last)] - self._ends[:, first]).tolist())

    def extremes(self, above: int, up_to: int) -> tuple[int, int]:
        """The shortest and the longest length above `above` and at most `up_to`; (0, 0) if none."""
        first, last = np.searchsorted(self.lengths, [above, up_to], side="right")
        if last <= first:
            return 0, 0
        return int(self.lengths[first]), int(self.lengths[last - 1])

    def packs_needed(self, above: int, capacity: int) -> int:
        """The least packs of `capacity` tokens for the sequences of `above` + 1 .. capacity tokens.

        The bound L2 of Martello and Toth (1990): sequences over half of a pack are alone with what
        is short enough to join them, for several ideas of "short".
        """
        first, last = np.searchsorted(self.lengths, [above, capacity], side="right")
        if last <= first:
            return 0
        middle = int(np.searchsorted(self.lengths, capacity // 2, side="right"))
        middle = min(max(middle, int(first)), int(last))
        tries = np.unique(np.linspace(first, middle, _MAX_TRIES).astype(np.int64))
        small = self.lengths[np.minimum(tries, len(self.lengths) - 1)]
        small = np.where(tries < middle, small, capacity // 2 + 1)
        # too long to be joined by a sequence of `small` tokens
        joined_to = np.searchsorted(self.lengths, capacity - small, side="right")
        joined_to = np.clip(joined_to, middle, last)
        count, tokens, _ = self._ends
        alone = count[last] - count[joined_to]
        large = count[joined_to] - count[middle]
        space = large * capacity - (tokens[joined_to] - tokens[middle])
        rest = tokens[middle] - tokens[tries] - space
        packs = alone + large + np.maximum(0, -(-rest // capacity))
        return int(packs.max())
