"""Placement: where every pack of a run trains, in a form that every method can produce.

A plan is one kind of placement: equal micro-batches of one level each. Others run packs of unlike
CP sizes side by side in a micro-batch, several after one another on a rank, or leave ranks idle.

Guarantees (asserted by tests/unit/test_metrics.py):
- sums are 64-bit;
- a rank's share of a pack is 1 / CP of it.
It imports NumPy only and decides nothing.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hbp.packing import check_lengths


@dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """The packs of all steps.

    seq_lens: int32|int64 [sequences], tokens of each input sequence, 0 for one left out.
    sequence_ids: int [placed], in pack order. pack_offsets: int64 [packs + 1] into sequence_ids.
    pack_cp, pack_first_rank: int [packs]: a pack runs on ranks first .. first + cp - 1.
    pack_microbatch: int [packs], ascending; micro-batches count through all steps.
    step_offsets: int64 [steps + 1] into micro-batches; no step is empty.
    token_budget: S, the most tokens of a rank in a micro-batch.
    cp1_pack_len: tokens of the longest sequence that may train with CP 1; 0 when none may.
    A rank without a pack in a micro-batch waits, as with a filler.
    """

    seq_lens: np.ndarray
    sequence_ids: np.ndarray
    pack_offsets: np.ndarray
    pack_cp: np.ndarray
    pack_first_rank: np.ndarray
    pack_microbatch: np.ndarray
    step_offsets: np.ndarray
    num_ranks: int
    token_budget: int
    cp1_pack_len: int

    @classmethod
    def of_levels(
        cls,
        *,
        seq_lens: np.ndarray,
        sequence_ids: np.ndarray,
        pack_offsets: np.ndarray,
        microbatch_offsets: np.ndarray,
        microbatch_level: np.ndarray,
        pack_lens: np.ndarray,
        cp_sizes: np.ndarray,
        num_ranks: int,
        num_microbatches: int,
    ) -> "Placement":
        """From the arrays of a plan (see plan.Plan): a level's packs fill a micro-batch.

        pack_lens, cp_sizes: int [levels]. num_microbatches: per step.
        """
        packs_per_microbatch = np.diff(microbatch_offsets)
        pack_cp = np.repeat(cp_sizes[microbatch_level], packs_per_microbatch)
        return cls(
            seq_lens=seq_lens,
            sequence_ids=sequence_ids,
            pack_offsets=pack_offsets,
            pack_cp=pack_cp,
            pack_first_rank=positions_in(packs_per_microbatch) * pack_cp,
            pack_microbatch=np.repeat(np.arange(len(microbatch_level)), packs_per_microbatch),
            step_offsets=np.arange(0, len(microbatch_level) + 1, num_microbatches),
            num_ranks=num_ranks,
            token_budget=int(pack_lens[0] // cp_sizes[0]),
            cp1_pack_len=int(pack_lens[cp_sizes == 1].max(initial=0)),
        )

    @property
    def num_steps(self) -> int:
        return len(self.step_offsets) - 1

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of all steps."""
        return int(self.step_offsets[-1])

    def pack_sums(self, values: np.ndarray) -> np.ndarray:
        """int64 [packs]: sums over each pack of int `values` [placed], one per sequence id."""
        # the running sum may wrap; a difference is right as long as the sum of a pack fits
        ends = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        return ends[self.pack_offsets[1:]] - ends[self.pack_offsets[:-1]]

    def rank_sums(self, values: np.ndarray) -> np.ndarray:
        """float64 [micro-batches, ranks]: sums of `values` [packs], one per rank of a pack."""
        cp_sizes = self.pack_cp.astype(np.int64)
        cells = self.pack_microbatch.astype(np.int64) * self.num_ranks + self.pack_first_rank
        cells = np.repeat(cells, cp_sizes) + positions_in(cp_sizes)
        sums = np.bincount(
            cells,
            weights=np.repeat(values, cp_sizes),
            minlength=self.num_microbatches * self.num_ranks,
        )
        return sums.reshape(self.num_microbatches, self.num_ranks)

    def step_sums(self, loads: np.ndarray) -> np.ndarray:
        """[steps, ...]: sums of `loads` [micro-batches, ...] over the micro-batches of a step."""
        return np.add.reduceat(loads, self.step_offsets[:-1], axis=0)

    def sequence_step(self) -> np.ndarray:
        """int64 [placed]: the step of each sequence id, ascending."""
        microbatch_step = np.repeat(np.arange(self.num_steps), np.diff(self.step_offsets))
        return np.repeat(microbatch_step[self.pack_microbatch], np.diff(self.pack_offsets))


def positions_in(counts: np.ndarray) -> np.ndarray:
    """int64: 0 .. count - 1 for each of counts, one after another."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)


def runs(seq_lens: np.ndarray, capacity: int) -> np.ndarray:
    """int64 [runs + 1]: offsets of runs of at most `capacity` tokens, each as long as can be.

    seq_lens: int [n], tokens, each at most capacity, in the order of the runs.
    """
    ends = np.cumsum(seq_lens, dtype=np.int64)
    offsets = [0]
    before = 0
    while offsets[-1] < len(ends):
        offsets.append(int(np.searchsorted(ends, before + capacity, side="right")))
        before = int(ends[offsets[-1] - 1])
    return np.array(offsets, dtype=np.int64)


def check_fit(seq_lens: np.ndarray, longest: int, rule: str) -> None:
    """Raises ValueError unless seq_lens is an array that packing takes, of 1 .. longest tokens.

    rule: what `longest` is, for the message.
    """
    check_lengths(seq_lens, "seq_lens")
    bad = np.flatnonzero((seq_lens < 1) | (seq_lens > longest))
    if len(bad):
        raise ValueError(
            f"sequence {bad[0]} has {seq_lens[bad[0]]} tokens (and {len(bad) - 1} more are out of "
            f"range); each must have 1 to {longest} ({rule}); leave out or cut the others"
        )
