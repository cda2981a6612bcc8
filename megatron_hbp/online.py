"""Online scheduling: each global batch for itself, with the CP size of each sequence its own.

How Megatron's dynamic context parallelism and its kin work, as a baseline: no sequence waits for a
better place in a later step, so that a batch is as even as its own sequences allow.

Guarantees (asserted by tests/unit/test_online.py):
- every sequence is in exactly one pack; no rank holds more than S tokens of a micro-batch;
- a pack runs on an aligned block of CP ranks, and a rank's packs of one micro-batch are nested, the
  largest CP size first: run in that order, no rank waits inside a micro-batch;
- the same arguments give the same placement.
"""

import math
from bisect import bisect_left
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise

import numpy as np

from megatron_hbp.cost import DENSE_8B_H100, PackCost
from megatron_hbp.placement import Placement, check_fit, runs

BARRIERS = ("microbatch", "step")


def schedule_online(
    seq_lens: np.ndarray,
    token_budget: int,
    num_ranks: int,
    num_microbatches: int,
    *,
    barrier: str = "microbatch",
    cost: PackCost = DENSE_8B_H100,
    seed: int = 1234,
) -> Placement:
    """One epoch of global batches, each scheduled without a look at the others.

    seq_lens: int32|int64 [n], tokens of each sequence. token_budget: S, tokens per rank and
    micro-batch. A global batch is the next sequences, in random order, with no more than
    num_ranks x num_microbatches x S tokens. Each sequence gets the smallest
    power-of-two CP size that puts at most S tokens on a rank. A micro-batch takes the sequences
    that are left, longest first, each on the block of ranks with least time that has room, and
    never above the height of its tallest sequence or of S tokens without attention, whichever is
    more; so micro-batches are as many as it takes. With barrier "step" a rank goes on to its next
    micro-batch at once, which only a model without pipeline and expert parallelism can do: then
    the blocks are balanced over the whole step. Raises ValueError when a setting is below 1 or a
    sequence does not fit all ranks together.
    """
    if barrier not in BARRIERS:
        raise ValueError(f"barrier {barrier!r} is unknown; use one of {', '.join(BARRIERS)}")
    settings = {
        "token_budget": token_budget,
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
    }
    for name, value in settings.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    largest_cp = 1 << (num_ranks.bit_length() - 1)
    check_fit(
        seq_lens,
        token_budget * largest_cp,
        f"S x the largest CP size: {token_budget} x {largest_cp}",
    )
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(seq_lens))
    lens = seq_lens.astype(np.int64)
    cp_sizes = np.ones(len(lens), dtype=np.int64)
    while (short := lens > token_budget * cp_sizes).any():
        cp_sizes[short] *= 2
    times = cost.per_rank(np.ones(len(lens)), lens, lens.astype(np.float64) ** 2, cp_sizes)
    # a pack's tokens on each of its ranks, in 1 / largest_cp tokens: whole numbers
    shares = lens * (largest_cp // cp_sizes)
    floor = float(cost.per_rank(*np.array([[0], [token_budget], [0], [1]]))[0])

    microbatch, first_rank = np.empty((2, len(lens)), dtype=np.int64)
    step_offsets = [0]
    offsets = runs(lens[order], token_budget * num_ranks * num_microbatches)
    for start, stop in pairwise(offsets.tolist()):
        ids = order[start:stop]
        ids = ids[np.argsort(-lens[ids], kind="stable")]
        batch = _Batch(cp_sizes[ids], times[ids], shares[ids], num_ranks)
        budget = token_budget * largest_cp
        places = batch.in_lockstep(budget, floor) if barrier == "microbatch" else batch.free(budget)
        microbatch[ids] = places[0] + step_offsets[-1]
        first_rank[ids] = places[1]
        step_offsets.append(step_offsets[-1] + int(places[0].max()) + 1)

    # the sequences of one micro-batch, CP size and block are a pack
    turn = np.lexsort((first_rank, -cp_sizes, microbatch))
    keys = np.stack([microbatch, cp_sizes, first_rank])[:, turn]
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(keys) != 0).any(axis=0)])[: len(lens)])
    return Placement(
        seq_lens=seq_lens,
        sequence_ids=turn,
        pack_offsets=np.concatenate([starts, [len(lens)]]),
        pack_cp=keys[1, starts],
        pack_microbatch=keys[0, starts],
        pack_first_rank=keys[2, starts],
        step_offsets=np.array(step_offsets, dtype=np.int64),
        num_ranks=num_ranks,
        token_budget=token_budget,
        cp1_pack_len=token_budget,
    )


class _Batch:
    """The sequences of one global batch, longest first.

    cp_sizes: int64 [n]. times: float64 [n], on each rank of the block. shares: int64 [n], tokens on
    each rank, in the caller's unit. Within a CP size, times and shares do not rise.
    """

    def __init__(
        self, cp_sizes: np.ndarray, times: np.ndarray, shares: np.ndarray, num_ranks: int
    ) -> None:
        self._cp_sizes = cp_sizes
        self._times = times
        self._shares = shares
        self._num_ranks = num_ranks

    def in_lockstep(self, budget: int, floor: float) -> tuple[np.ndarray, np.ndarray]:
        """(micro-batch, first rank) of each sequence, int64 [n].

        budget: the most of a rank's shares in a micro-batch. floor: a micro-batch takes this time
        even when its tallest sequence takes less.
        """
        microbatch, first_rank = np.empty((2, len(self._times)), dtype=np.int64)
        left = np.arange(len(self._times))
        index = 0
        while len(left):
            places = self._fill(left, budget, max(floor, float(self._times[left].max())))
            placed = places >= 0
            microbatch[left[placed]] = index
            first_rank[left[placed]] = places[placed]
            left = left[~placed]
            index += 1
        return microbatch, first_rank

    def free(self, budget: int) -> tuple[np.ndarray, np.ndarray]:
        """As in_lockstep(), when no rank waits for the others between micro-batches."""
        everything = np.arange(len(self._times))
        first_rank = self._fill(everything, math.inf, math.inf)
        microbatch = np.zeros(len(everything), dtype=np.int64)
        index, used = [0] * self._num_ranks, [0] * self._num_ranks
        places = zip(
            first_rank.tolist(), self._cp_sizes.tolist(), self._shares.tolist(), strict=True
        )
        for sequence, (rank, cp_size, share) in enumerate(places):
            # all ranks of the block are alike, as in _fill()
            full = used[rank] + share > budget
            now = index[rank] + full
            index[rank : rank + cp_size] = [now] * cp_size
            used[rank : rank + cp_size] = [share + (0 if full else used[rank])] * cp_size
            microbatch[sequence] = now
        return microbatch, first_rank

    def _fill(self, left: np.ndarray, budget: float, height: float) -> np.ndarray:
        """int64 [left]: the first rank of each sequence in the next micro-batch, -1 for none."""
        places = np.full(len(left), -1, dtype=np.int64)
        # larger blocks come first, so that all ranks of a block are alike when it is its turn
        loads, used = [0.0] * self._num_ranks, [0] * self._num_ranks
        cp_sizes = self._cp_sizes[left]
        start = 0
        while start < len(left):
            cp_size = int(cp_sizes[start])
            stop = start + int(np.count_nonzero(cp_sizes[start:] == cp_size))
            blocks = range(0, self._num_ranks - cp_size + 1, cp_size)
            found = _fill_blocks(
                self._times[left[start:stop]].tolist(),
                self._shares[left[start:stop]].tolist(),
                [(loads[rank], used[rank], rank) for rank in blocks],
                budget,
                height,
            )
            places[start:stop] = found[0]
            for load, tokens, rank in found[1]:
                loads[rank : rank + cp_size] = [load] * cp_size
                used[rank : rank + cp_size] = [tokens] * cp_size
            start = stop
        return places


def _fill_blocks(
    times: list[float],
    shares: list[int],
    blocks: list[tuple[float, int, int]],
    budget: float,
    height: float,
) -> tuple[list[int], list[tuple[float, int, int]]]:
    """Places sequences of one CP size, each on the block with least time that has room.

    times, shares: not rising. blocks: (time, share, first rank) of each so far. Returns the first
    rank of each sequence, -1 for none, and the blocks as they are then.
    """
    places = [-1] * len(times)
    rising_times, rising_shares = [-time for time in times], [-share for share in shares]
    active = list(blocks)
    heapify(active)
    blocked: list[tuple[int, tuple[float, int, int]]] = []  # until which sequence, block
    full = []
    index = 0
    while index < len(times):
        while blocked and blocked[0][0] <= index:
            heappush(active, heappop(blocked)[1])
        while active:
            load, used, rank = active[0]
            if used + shares[index] <= budget and load + times[index] <= height:
                break
            block = heappop(active)
            fits = max(
                bisect_left(rising_shares, used - budget, index),
                bisect_left(rising_times, load - height, index + 1),
            )
            if fits < len(times):
                heappush(blocked, (fits, block))
            else:
                full.append(block)
        if active:
            places[index] = rank
            heapreplace(active, (load + times[index], used + shares[index], rank))
            index += 1
        elif blocked:
            index = blocked[0][0]
        else:
            break
    return places, active + full + [block for _, block in blocked]
