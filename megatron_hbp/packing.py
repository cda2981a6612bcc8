"""Which sequences share a pack: the packing methods, and packs of all levels of one epoch.

Guarantees (asserted by tests/unit/test_packing.py and tests/unit/test_kernels.py):
- every sequence is in exactly one pack and no pack is over its capacity;
- the same arguments give the same packs, on any machine and with any number of threads: randomness
  comes from the seed alone (randomness.py);
- the C++ kernels (csrc/) equal tests/reference.py exactly.
It does not look at attention cost (balance.py) nor at whole steps (schedule.py). From 32768
sequences on the kernels use two threads.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hbp import _C
from megatron_hbp.config import PACKERS
from megatron_hbp.randomness import mix_seed

MAX_CAPACITY = 2**31 - 1
# Packs in random order that are this much more than the tokens fill are packed again, closer.
_SPACE_WORTH_A_LOOK = 1.002
_WIDE = 2**31  # from this many sequences on, ids are int64


def pack(
    seq_lens: np.ndarray,
    capacity: int,
    method: str = "best_fit",
    seed: int = 0,
    *,
    threshold: int | None = None,
    iterations: int = 20,
) -> tuple[np.ndarray, np.ndarray]:
    """Packs sequences into packs of at most `capacity` tokens.

    seq_lens: int32|int64 [n], tokens, each 1 .. capacity, used without a copy. method: best_fit and
    next_fit visit the sequences in random order, the decreasing ones by descending length with
    random ties; isf (iterative sampling and filtering, paper section 3) repeats shuffling and
    next_fit `iterations` times and keeps packs of at least `threshold` tokens (None: all but 128 of
    the capacity, or but 1/32 of it where that is less).
    Returns (order int32 [n], int64 from 2**31 sequences on; offsets int64 [packs + 1]): pack p
    holds the sequences order[offsets[p]:offsets[p + 1]]. Raises ValueError for other arrays,
    lengths, methods or numbers.
    """
    check_lengths(seq_lens, "seq_lens")
    for name, value in (("capacity", capacity), ("seed", seed), ("iterations", iterations)):
        if not isinstance(value, int | np.integer):
            raise ValueError(f"{name} is {value!r}; it must be a whole number")
    capacity, seed = int(capacity), int(seed)
    if not 1 <= capacity <= MAX_CAPACITY:
        raise ValueError(f"capacity is {capacity} tokens; it must be 1 to {MAX_CAPACITY}")
    _check_packer(method)
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be 0 or more")
    if iterations < 1 or (threshold is not None and not 0 <= threshold <= capacity):
        raise ValueError(
            f"iterations is {iterations} and threshold {threshold}; they must be at least 1 and "
            f"0 to {capacity}, the capacity"
        )
    try:
        items, _ = shuffled(seq_lens, np.array([capacity]), mix_seed(seed))
        fits = len(items) == len(seq_lens)  # lengths of 0 are left out
    except ValueError:
        fits = False
    if not fits:
        bad = np.flatnonzero((seq_lens < 1) | (seq_lens > capacity))
        raise ValueError(
            f"sequence {bad[0]} has {seq_lens[bad[0]]} tokens (and {len(bad) - 1} more are out of "
            f"range); each must have 1 to {capacity}, the capacity"
        )
    pack_of, num_packs = pack_items(
        items, capacity, 1, method, mix_seed(seed, 1), threshold=threshold, iterations=iterations
    )
    return _C.group(items, pack_of, num_packs)


def shuffled(
    seq_lens: np.ndarray, limits: np.ndarray, seed: int, chosen: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences by level in random order: (items, starts int64 [levels + 1]).

    limits: int64 [levels], ascending; a sequence belongs to the first level whose limit is at least
    its length, one of length 0 to none. chosen: ids to take, repeats allowed (None: each once).
    items: structured array of `id` and `length`; the longest level's come first, items[:starts[1]].
    """
    wide = len(seq_lens) >= _WIDE
    shuffle = _C.shuffled_by_level_wide if wide else _C.shuffled_by_level
    return shuffle(seq_lens, limits, seed, chosen)


def pack_items(
    items: np.ndarray,
    capacity: int,
    multiple: int,
    method: str,
    seed: int,
    *,
    threshold: int | None = None,
    iterations: int = 20,
    out: np.ndarray | None = None,
) -> tuple[np.ndarray, int]:
    """Packs items that are in random order; lengths are charged rounded up to `multiple`.

    Reorders items in place where the method does; returns (pack_of, in `out` if given; num_packs).
    """
    if method == "best_fit":
        return _C.best_fit(items, capacity, multiple, True, out=out)
    if method == "next_fit":
        return _C.next_fit(items, capacity, multiple, out=out)
    if method == "isf":
        if threshold is None:
            threshold = capacity - min(128, capacity // 32)
        return _C.iterative_sampling(
            items, capacity, multiple, threshold, iterations, seed, out=out
        )
    _C.sort_descending(items, seed)
    kernel = _C.best_fit if method == "best_fit_decreasing" else _C.first_fit
    return kernel(items, capacity, multiple, out=out)


@dataclass
class LevelPacks:
    """Packs of all levels of one epoch, while they are made.

    items: the sequences, in the order in which packs list them. pack_of: [items], the pack of each.
    levels: int64 [packs]. sums: int64 [3, packs], sequences, tokens and the sum of squared lengths.
    """

    items: np.ndarray
    pack_of: np.ndarray
    levels: np.ndarray
    sums: np.ndarray


def pack_levels(
    seq_lens: np.ndarray,
    *,
    pack_lens: np.ndarray,
    multiples: np.ndarray,
    units: np.ndarray,
    packer: str,
    seed: int,
    chosen: np.ndarray | None = None,
) -> LevelPacks:
    """Packs every level, from the longest to the shortest; space is filled with shorter sequences.

    seq_lens: int32|int64 [n], 0 for a sequence to leave out. pack_lens, multiples, units: int64
    [levels]; each length is charged rounded up to its level's multiple, and a level that is used
    gets whole units of packs as long as there are shorter sequences to fill them. chosen: see
    shuffled(). Steps 1 to 3 of the paper's section 3: GroupData, packing, GreedyFill. With packer
    best_fit the longer levels are filled with a look-ahead (csrc/filling.h).
    """
    num_levels = len(pack_lens)
    limits = np.maximum.accumulate(pack_lens // multiples * multiples)
    items, starts = shuffled(seq_lens, limits, mix_seed(seed, 0), chosen)
    fronts = starts[:-1][::-1].copy()  # by level: the first item that is in no pack
    ends = starts[1:][::-1]
    pack_of = _C.empty_packs(items)
    pack_level: list[np.ndarray] = []
    num_packs = 0
    for level in reversed(range(num_levels)):
        own = slice(int(fronts[level]), int(ends[level]))
        capacity, multiple = int(pack_lens[level]), int(multiples[level])
        num_own = _pack_own(
            items[own],
            pack_of[own],
            capacity=capacity,
            multiple=multiple,
            packer="look_ahead" if packer == "best_fit" and level > 0 else packer,
            seed=mix_seed(seed, 1, level),
        )
        pack_of[own] += num_packs
        num_here = num_own
        if level > 0 and num_own:
            num_here = -(-num_own // int(units[level])) * int(units[level])
            spaces = np.full(num_here, capacity, dtype=np.int64)
            charges = -(-items["length"][own].astype(np.int64) // multiple) * multiple
            np.subtract.at(spaces, pack_of[own] - num_packs, charges)
            for shorter in reversed(range(level)):
                rest = slice(int(fronts[shorter]), int(ends[shorter]))
                fronts[shorter] += _C.greedy_fill(
                    items[rest], multiple, spaces, num_packs, pack_of[rest]
                )
            # packs are filled in order, so what stays empty is at the end
            num_here = max(num_own, int(np.count_nonzero(spaces < capacity)))
        pack_level.append(np.full(num_here, level, dtype=np.int64))
        num_packs += num_here
    sums = _C.sum_packs(items, pack_of, num_packs)
    return LevelPacks(items, pack_of, np.concatenate(pack_level), sums)


def _pack_own(
    items: np.ndarray, pack_of: np.ndarray, *, capacity: int, multiple: int, packer: str, seed: int
) -> int:
    """Packs the sequences of one level; writes pack_of, may reorder items; returns num_packs."""
    if packer == "look_ahead":
        return _C.look_ahead(items, capacity, multiple, seed, out=pack_of)[1]
    _, num_packs = pack_items(items, capacity, multiple, packer, seed, out=pack_of)
    if packer != "best_fit":
        return num_packs
    # few sequences to a pack: random order leaves space that a look-ahead may find a use for
    lens = items["length"]
    alone = int(np.count_nonzero(lens > capacity // 2))
    tokens = int(lens.sum(dtype=np.int64))
    if num_packs > max(alone, 1 + _SPACE_WORTH_A_LOOK * tokens / capacity):
        closer, num_closer = _C.look_ahead(items, capacity, multiple, seed)
        if num_closer < num_packs:
            pack_of[:] = closer
            return num_closer
    return num_packs


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """int64 [n + 1]: 0 and the running sums of counts."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


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


def _check_packer(method: str) -> None:
    if method not in PACKERS:
        raise ValueError(f"packer {method!r} is unknown; use one of {', '.join(PACKERS)}")
