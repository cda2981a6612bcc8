"""Which sequences share a pack: the packing methods, and packs of all levels of one epoch.

Guarantees (asserted by tests/unit/test_packing.py):
- every sequence is in exactly one pack and no pack is over its capacity;
- the same arguments give the same packs: randomness comes from the seed alone, as
  `numpy.random.Generator(PCG64(seed)).permutation`;
- the C++ kernels (csrc/packing.cpp) equal tests/reference.py exactly.
It does not look at attention cost (balance.py) nor at whole steps (schedule.py).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hbp.config import PACKERS

try:
    from megatron_hbp import _C
except ImportError as error:
    raise ImportError(
        "megatron_hbp._C, the compiled planner kernels, cannot be imported; build them in the "
        "repository with: pip install pybind11 && pip install -e . --no-deps --no-build-isolation"
    ) from error

_MAX_CAPACITY = 2**31 - 1
_ISF_ROUNDS = 20
# Levels with CP above 1 are packed in a nearly decreasing order: each length counts as up to this
# share longer than it is. Enough to give every epoch other packs, too little to leave more space.
_ORDER_NOISE = 0.05


@dataclass(frozen=True)
class Packs:
    """Packs of one level. sequence_ids: int64 [n], in pack order. offsets: int64 [packs + 1]."""

    sequence_ids: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def from_lists(cls, packs: Sequence[Sequence[int] | np.ndarray]) -> "Packs":
        """From one list or array of sequence ids per pack; an empty one is a filler."""
        counts = np.array([len(pack) for pack in packs], dtype=np.int64)
        ids = np.concatenate([np.empty(0, np.int64), *(np.asarray(p, np.int64) for p in packs)])
        return cls(ids, offsets_of(counts))

    def to_lists(self) -> list[list[int]]:
        """One list of sequence ids per pack."""
        return [ids.tolist() for ids in np.split(self.sequence_ids, self.offsets[1:-1])][
            : len(self)
        ]

    def counts(self) -> np.ndarray:
        """int64 [packs]: sequences of each pack."""
        return np.diff(self.offsets)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """int64 [packs]: sums over each pack of `values`, one per sequence id."""
        ends = offsets_of(values[self.sequence_ids])
        return ends[self.offsets[1:]] - ends[self.offsets[:-1]]

    def select(self, indices: np.ndarray) -> "Packs":
        """The packs at `indices`, in that order."""
        counts = self.counts()[indices]
        offsets = offsets_of(counts)
        shift = np.repeat(self.offsets[:-1][indices] - offsets[:-1], counts)
        return Packs(self.sequence_ids[np.arange(offsets[-1]) + shift], offsets)

    def joined(self, other: "Packs") -> "Packs":
        """These packs followed by those of `other`."""
        return Packs(
            np.concatenate([self.sequence_ids, other.sequence_ids]),
            np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]]),
        )


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """int64 [n + 1]: 0 and the running sums of counts."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def make_rng(seed: int | Sequence[int]) -> np.random.Generator:
    """The generator of everything random in a plan."""
    return np.random.Generator(np.random.PCG64(seed))


def pack(
    seq_lens: np.ndarray, capacity: int, method: str, seed: int | Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Packs sequences into packs of at most `capacity` tokens.

    seq_lens: int32|int64 [n], tokens, each 1 .. capacity, used without a copy. method: best_fit and
    next_fit visit the sequences in random order, the decreasing ones by descending length with
    random ties; isf repeats shuffling and next_fit and keeps packs that are nearly full.
    Returns (order int64 [n], offsets int64 [packs + 1]): pack p holds the sequences
    order[offsets[p]:offsets[p + 1]]. Raises ValueError for other arrays, lengths or methods.
    """
    check_lengths(seq_lens, "seq_lens")
    if not 1 <= capacity <= _MAX_CAPACITY:
        raise ValueError(f"capacity is {capacity} tokens; it must be 1 to {_MAX_CAPACITY}")
    bad = np.flatnonzero((seq_lens < 1) | (seq_lens > capacity))
    if len(bad):
        raise ValueError(
            f"sequence {bad[0]} has {seq_lens[bad[0]]} tokens (and {len(bad) - 1} more are out of "
            f"range); each must have 1 to {capacity}, the capacity"
        )
    rng = make_rng(seed)
    shuffled = rng.permutation(len(seq_lens))
    if method == "best_fit":
        return _C.best_fit(seq_lens, shuffled, capacity)
    if method == "best_fit_decreasing":
        return _C.best_fit(seq_lens, _decreasing(seq_lens, shuffled), capacity)
    if method == "first_fit_decreasing":
        return _C.first_fit(seq_lens, _decreasing(seq_lens, shuffled), capacity)
    if method == "next_fit":
        return shuffled, _next_fit(seq_lens[shuffled], capacity)
    if method == "isf":
        return _isf(seq_lens, capacity, shuffled, rng)
    raise ValueError(f"packer {method!r} is unknown; use one of {', '.join(PACKERS)}")


def pack_levels(
    seq_lens: np.ndarray,
    groups: np.ndarray,
    *,
    pack_lens: np.ndarray,
    cp_sizes: np.ndarray,
    multiples: np.ndarray,
    packer: str,
    rng: np.random.Generator,
) -> list[Packs]:
    """Packs every level, from the longest to the shortest; space is filled with shorter sequences.

    seq_lens: int64 [n]. groups: int [n], the level each sequence belongs to, -1 for none.
    pack_lens, cp_sizes, multiples: int64 [levels]; each length is charged rounded up to its level's
    multiple. rng: made for this epoch.
    """
    pools = [
        _Pool(rng.permutation(np.flatnonzero(groups == level)), seq_lens)
        for level in range(len(pack_lens))
    ]
    packs = []
    for level in reversed(range(len(pack_lens))):
        ids = pools[level].left()
        multiple = int(multiples[level])
        capacity = int(pack_lens[level])
        aligned = -(-seq_lens[ids] // multiple) * multiple
        if packer == "best_fit" and cp_sizes[level] > 1:
            stretched = aligned * (1.0 + _ORDER_NOISE * rng.random(len(ids)))
            order, offsets = _C.best_fit(aligned, np.argsort(-stretched, kind="stable"), capacity)
        else:
            order, offsets = pack(aligned, capacity, packer, rng.integers(2**63))
        packed = Packs(ids[order], offsets)
        if level > 0 and len(packed):
            spaces = capacity - Packs(order, offsets).sums(aligned)
            packed = _greedy_fill(packed, spaces, multiple, pools[level - 1 :: -1])
        packs.append(packed)
    return packs[::-1]


def check_lengths(array: np.ndarray, name: str) -> None:
    """Raises ValueError unless `array` is one-dimensional, contiguous int32 or int64."""
    if (
        not isinstance(array, np.ndarray)
        or array.ndim != 1
        or array.dtype not in (np.int32, np.int64)
        or not array.flags.c_contiguous
    ):
        found = (
            f"{array.dtype} {list(array.shape)}"
            f"{'' if array.flags.c_contiguous else ', not contiguous'}"
            if isinstance(array, np.ndarray)
            else type(array).__name__
        )
        raise ValueError(
            f"{name} is {found}; it must be a one-dimensional contiguous int32 or int64 array, "
            "e.g. numpy.ascontiguousarray(lengths, dtype=numpy.int64)"
        )


def _decreasing(seq_lens: np.ndarray, shuffled: np.ndarray) -> np.ndarray:
    return shuffled[np.argsort(-seq_lens[shuffled], kind="stable")]


def _next_fit(visited_lens: np.ndarray, capacity: int) -> np.ndarray:
    """Offsets of next-fit packs: runs that end where the next sequence does not fit."""
    ends = np.cumsum(visited_lens, dtype=np.int64)
    offsets = [0]
    before = 0
    while offsets[-1] < len(ends):
        offsets.append(int(np.searchsorted(ends, before + capacity, side="right")))
        before = int(ends[offsets[-1] - 1])
    return np.array(offsets, dtype=np.int64)


def _isf(
    seq_lens: np.ndarray, capacity: int, shuffled: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Iterative sampling and filtering: keeps nearly full next-fit packs, repeats with the rest."""
    threshold = capacity - min(128, capacity // 32)
    kept = Packs(np.empty(0, np.int64), np.zeros(1, np.int64))
    for _ in range(_ISF_ROUNDS):
        tried = Packs(shuffled, _next_fit(seq_lens[shuffled], capacity))
        full = tried.sums(seq_lens) >= threshold
        kept = kept.joined(tried.select(np.flatnonzero(full)))
        rest = tried.select(np.flatnonzero(~full))
        if len(rest) == 0:
            break
        shuffled = rng.permutation(rest.sequence_ids)
    else:
        kept = kept.joined(rest)
    return kept.sequence_ids, kept.offsets


class _Pool:
    """Sequences of one level that are in no pack yet, drawn at random or by length."""

    def __init__(self, ids: np.ndarray, seq_lens: np.ndarray) -> None:
        self._ids = ids
        self._lens = seq_lens[ids]
        self._taken = np.zeros(len(ids), dtype=bool)
        self._cursor = 0
        self._sorted: list[int] = []

    def left(self) -> np.ndarray:
        """int64: the ids that were not drawn, in random order."""
        return self._ids[~self._taken]

    def draw_into(self, space: int, multiple: int) -> tuple[list[int], int]:
        """Draws until nothing fits `space` tokens; returns the ids and the space that is left.

        First in random order, so that packs hold what the corpus holds; from the first misfit on
        the longest that fits, so that the space is filled almost exactly.
        """
        drawn = []
        fits = True
        while space > 0:
            place = self._next_at_random() if fits else self._longest(space // multiple * multiple)
            if place is None:
                break
            charge = -(-int(self._lens[place]) // multiple) * multiple
            if charge > space:
                fits = False
                continue
            self._taken[place] = True
            drawn.append(int(self._ids[place]))
            space -= charge
        return drawn, space

    def _next_at_random(self) -> int | None:
        while self._cursor < len(self._ids) and self._taken[self._cursor]:
            self._cursor += 1
        return self._cursor if self._cursor < len(self._ids) else None

    def _longest(self, limit: int) -> int | None:
        """The longest sequence of at most `limit` tokens that is left."""
        if not self._sorted and len(self._ids):
            self._by_length = np.argsort(self._lens, kind="stable").tolist()
            self._sorted = self._lens[self._by_length].tolist()
            self._below = list(range(len(self._ids)))  # union-find: the next one left, downwards
        rank = bisect_right(self._sorted, limit) - 1
        path = []
        while rank >= 0:
            if not self._taken[self._by_length[rank]]:
                break
            path.append(rank)
            rank = self._below[rank] if self._below[rank] != rank else rank - 1
        for passed in path:
            self._below[passed] = rank
        return self._by_length[rank] if rank >= 0 else None


def _greedy_fill(packs: Packs, spaces: np.ndarray, multiple: int, pools: Sequence[_Pool]) -> Packs:
    """Fills the space of each pack from the pools, the first pool first."""
    added: list[list[int]] = []
    for space in spaces.tolist():
        ids: list[int] = []
        left = space
        for pool in pools:
            drawn, left = pool.draw_into(left, multiple)
            ids += drawn
        added.append(ids)
    extra = Packs.from_lists(added)
    # each pack, then its additions: sort the ids of both by pack
    pack_of = np.concatenate(
        [np.repeat(np.arange(len(packs)), part.counts()) for part in (packs, extra)]
    )
    together = np.concatenate([packs.sequence_ids, extra.sequence_ids])
    filled = together[np.argsort(pack_of, kind="stable")]
    return Packs(filled, offsets_of(packs.counts() + extra.counts()))
