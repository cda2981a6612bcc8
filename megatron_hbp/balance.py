"""Whole micro-batches whose packs cost the same: spreading over whole micro-batches, neighbours.

Guarantees (asserted by tests/unit/test_balance.py and tests/unit/test_planner.py):
- no sequence is lost or repeated, no pack grows over its level's pack_len;
- the number of micro-batches is the least that whole steps allow without packing anew;
- a filler (a pack without sequences) remains only where no pack has a sequence to spare that the
  filler's level can hold.
It does not order micro-batches into steps: that is schedule.py.
"""

import numpy as np

from megatron_hbp import _C
from megatron_hbp.cost import PackCost
from megatron_hbp.packing import LevelPacks


def whole_units(
    packs: LevelPacks,
    *,
    pack_lens: np.ndarray,
    multiples: np.ndarray,
    replicas: np.ndarray,
    microbatches_together: int,
    one_level: bool,
    cost: PackCost,
) -> LevelPacks:
    """Spreads the cheapest packs over more until the packs fill whole micro-batches and steps.

    pack_lens, multiples, replicas: int64 [levels], replicas being the packs of a micro-batch.
    microbatches_together: the micro-batches, of each level if one_level, else of all, must be a
    multiple of it; those that are missing go to the shortest level that has sequences to spare.
    Packs that still lack get a sequence of another level's pack that has several, else they are
    fillers.
    """
    units = replicas * (microbatches_together if one_level else 1)
    have = np.bincount(packs.levels, minlength=len(units))
    sequences = np.bincount(packs.levels, weights=packs.sums[0], minlength=len(units))
    wanted = -(-have // units)
    if not one_level:
        missing = -int(wanted.sum()) % microbatches_together
        wanted[_level_to_spare(have, sequences, (wanted + missing) * units)] += missing
    for level in np.flatnonzero(wanted * units > have).tolist():
        packs = _with_more(
            packs,
            level,
            int(wanted[level] * units[level] - have[level]),
            capacity=int(pack_lens[level]),
            multiple=int(multiples[level]),
            replicas=int(replicas[level]),
            cost=cost,
        )
    _replace_fillers(packs, pack_lens // multiples * multiples)
    return packs


def neighbours(costs: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """int64 [packs]: packs by level, then by ascending cost, ties by place.

    costs: float64 [packs]. levels: int64 [packs]. Neighbours cost the same, so cutting each level's
    packs into micro-batches balances them (paper section 3, step 4).
    """
    order = []
    for level in range(int(levels.max()) + 1):
        here = np.flatnonzero(levels == level)
        order.append(here[np.argsort(costs[here], kind="stable")])
    return np.concatenate(order)


def replica_order(
    costs: np.ndarray, starts: np.ndarray, per_step: int, num_ranks: int
) -> np.ndarray:
    """int64 [packs]: every micro-batch's packs ordered so that ranks do equally much in a step.

    costs: float64 [packs], for each rank of a pack. starts: int64 [micro-batches + 1] into packs.
    The costliest pack of a micro-batch goes to the replica that has least to do so far in the step.
    """
    return _C.replica_order(costs, starts, per_step, num_ranks)


def _level_to_spare(have: np.ndarray, sequences: np.ndarray, packs: np.ndarray) -> int:
    """The shortest level in use with a sequence for each of `packs`, else the one that lacks least.

    have, sequences, packs: int64 [levels].
    """
    spare = np.minimum(sequences - packs, 0)
    return max(np.flatnonzero(have).tolist(), key=lambda level: (spare[level], -level))


def _with_more(
    packs: LevelPacks,
    level: int,
    num_new: int,
    *,
    capacity: int,
    multiple: int,
    replicas: int,
    cost: PackCost,
) -> LevelPacks:
    """`num_new` packs more of a level, filled from its cheapest packs; else they are fillers."""
    while num_new:
        candidates = np.flatnonzero((packs.levels == level) & (packs.sums[0] > 1))
        if len(candidates) == 0:
            break
        counts, tokens, squares = packs.sums[:, candidates]
        costs = cost.per_rank(counts, tokens, squares, np.ones_like(counts))
        by_cost = np.argsort(costs, kind="stable")
        # whole micro-batches come out of it, about half full or fuller, a sequence for each pack
        num_chosen = -(-2 * num_new // replicas) * replicas - num_new
        spare = np.cumsum(counts[by_cost] - 1)
        num_chosen = max(num_chosen, int(np.searchsorted(spare, num_new)) + 1)
        chosen = candidates[by_cost[:num_chosen]]
        sums = _C.spread_packs(
            packs.items, packs.pack_of, capacity, multiple, chosen, num_new, len(packs.levels)
        )
        packs.sums[:, chosen] = sums[:, : len(chosen)]
        filled = sums[:, len(chosen) :]
        filled = filled[:, filled[0] > 0]
        packs = _with_packs(packs, level, filled)
        num_new -= filled.shape[1]
    return _with_packs(packs, level, np.zeros((3, num_new), dtype=np.int64))


def _with_packs(packs: LevelPacks, level: int, sums: np.ndarray) -> LevelPacks:
    return LevelPacks(
        packs.items,
        packs.pack_of,
        np.concatenate([packs.levels, np.full(sums.shape[1], level, dtype=np.int64)]),
        np.concatenate([packs.sums, sums], axis=1),
    )


def _replace_fillers(packs: LevelPacks, limits: np.ndarray) -> None:
    """Gives empty packs a sequence of another level's pack that has several, longest first."""
    for level, limit in enumerate(limits):
        empty = np.flatnonzero((packs.levels == level) & (packs.sums[0] == 0))
        for giver in reversed(range(len(limits))):
            if giver == level or len(empty) == 0:
                continue
            places = _to_spare(packs, giver, int(limit))[: len(empty)]
            lens = packs.items["length"][places].astype(np.int64)
            sums = np.stack([np.ones_like(lens), lens, lens * lens])
            for kept, taken in zip(packs.sums, sums, strict=True):
                np.subtract.at(kept, packs.pack_of[places], taken)
            packs.pack_of[places] = empty[: len(places)]
            packs.sums[:, empty[: len(places)]] = sums
            empty = empty[len(places) :]


def _to_spare(packs: LevelPacks, level: int, limit: int) -> np.ndarray:
    """Items of at most `limit` tokens in packs of a level, each of which keeps its longest."""
    gives = (packs.levels == level) & (packs.sums[0] > 1)
    places = np.flatnonzero(gives[packs.pack_of])
    pack_of, lens = packs.pack_of[places], packs.items["length"][places]
    by_length = np.lexsort((-lens, pack_of))  # the longest of each pack first
    is_longest = np.ones(len(places), dtype=bool)
    is_longest[1:] = np.diff(pack_of[by_length]) > 0
    spare = by_length[~is_longest]
    return np.sort(places[spare[lens[spare] <= limit]])
