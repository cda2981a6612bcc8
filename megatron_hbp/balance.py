"""Whole micro-batches whose packs cost the same: attention cost, merging, evening out, neighbours.

Guarantees (asserted by tests/unit/test_planner.py):
- no sequence is lost or repeated, no pack grows over its level's pack_len;
- the number of micro-batches is the least that whole steps allow without packing anew;
- a filler (a pack without sequences) remains only where no pack can give up a sequence for it.
It does not order micro-batches into steps: that is schedule.py.
"""

import heapq
from bisect import bisect_right, insort

import numpy as np

from megatron_hbp.packing import Packs, offsets_of, pack


def whole_units(
    packs: list[Packs],
    seq_lens: np.ndarray,
    *,
    pack_lens: np.ndarray,
    multiples: np.ndarray,
    units: np.ndarray,
    units_together: int,
) -> list[Packs]:
    """Changes the packs of one epoch until they fill whole units of every level.

    packs: one entry per level, ascending. seq_lens: int64, tokens by sequence id. pack_lens,
    multiples: int64 [levels]. units: int64 [levels], packs of one unit (a micro-batch, or a step of
    one level). units_together: the number of units over all levels must be a multiple of it.

    Left-over packs are merged into free places of longer levels when that saves a unit that counts;
    otherwise their sequences are spread over a whole unit.
    """
    fewer = [packs]  # fewer[i] takes i units less than packs
    while (merged := _merge_leftover(fewer[-1], seq_lens, pack_lens, multiples, units)) is not None:
        fewer.append(merged)
    needed = _num_units(fewer[-1], units)
    total = -(-int(needed.sum()) // units_together) * units_together
    chosen = fewer[max(0, int(_num_units(packs, units).sum()) - total)]
    wanted = _num_units(chosen, units)
    level = _level_with_sequences_to_spare(chosen, wanted, units)
    wanted[level] += total - int(wanted.sum())
    spread = [
        _spread(chosen[k], seq_lens, int(multiples[k]), int(units[k]), int(wanted[k] * units[k]))
        for k in range(len(chosen))
    ]
    return _replace_fillers(spread, seq_lens, pack_lens, multiples)


def neighbours(packs: Packs, seq_lens: np.ndarray) -> Packs:
    """The packs by ascending attention cost, ties by place, so that neighbours cost the same."""
    return packs.select(np.argsort(attention_costs(packs, seq_lens), kind="stable"))


def attention_costs(packs: Packs, seq_lens: np.ndarray) -> np.ndarray:
    """int64 [packs]: the sum of squared sequence lengths of each pack."""
    return packs.sums(seq_lens * seq_lens)


def replica_order(costs: np.ndarray, rank_costs: np.ndarray) -> np.ndarray:
    """The order of a micro-batch's packs over replicas that evens out a step.

    costs: float64 [packs], cost per rank of each pack. rank_costs: float64 [ranks], what each rank
    has in the step so far, updated in place. The costliest pack goes to the replica that has least.
    """
    by_replica = rank_costs.reshape(len(costs), -1)
    replicas = np.argsort(by_replica.max(axis=1), kind="stable")
    order = np.empty(len(costs), dtype=np.int64)
    order[replicas] = np.argsort(-costs, kind="stable")
    by_replica += costs[order][:, None]
    return order


def _num_units(packs: list[Packs], units: np.ndarray) -> np.ndarray:
    counts = np.array([len(level_packs) for level_packs in packs], dtype=np.int64)
    return -(-counts // units)


def _merge_leftover(
    packs: list[Packs],
    seq_lens: np.ndarray,
    pack_lens: np.ndarray,
    multiples: np.ndarray,
    units: np.ndarray,
) -> list[Packs] | None:
    """Moves what is over whole units of a level into a longer level's last unit, if it fits there.

    Shortest level first, into the shortest level that takes it. None when no level can.
    """
    for short in range(len(packs) - 1):
        num_left = len(packs[short]) % int(units[short])
        if num_left == 0:
            continue
        tokens = packs[short].sums(seq_lens)
        emptiest = np.argsort(tokens, kind="stable")
        ids = packs[short].select(emptiest[:num_left]).sequence_ids
        for long in range(short + 1, len(packs)):
            num_free = -len(packs[long]) % int(units[long])
            if num_free == 0:
                continue
            aligned = -(-seq_lens[ids] // multiples[long]) * multiples[long]
            if (aligned > pack_lens[long]).any():
                continue
            order, offsets = pack(aligned, int(pack_lens[long]), "best_fit_decreasing", 0)
            if len(offsets) - 1 <= num_free:
                result = list(packs)
                result[short] = packs[short].select(np.sort(emptiest[num_left:]))
                result[long] = packs[long].joined(Packs(ids[order], offsets))
                return result
    return None


def _level_with_sequences_to_spare(
    packs: list[Packs], num_units: np.ndarray, units: np.ndarray
) -> int:
    """The shortest level in use that can fill one more unit, else the one that comes closest."""
    spare = [
        len(level_packs.sequence_ids) - (int(num) + 1) * int(unit)
        for level_packs, num, unit in zip(packs, num_units, units, strict=True)
    ]
    used = [level for level in range(len(packs)) if len(packs[level])]
    return max(used, key=lambda level: (min(spare[level], 0), -level))


def _spread(packs: Packs, seq_lens: np.ndarray, multiple: int, unit: int, num_packs: int) -> Packs:
    """Makes `num_packs` packs, whole units, of fewer: evens out the cheapest ones."""
    num_new = num_packs - len(packs)
    if num_new == 0:
        return packs
    aligned = -(-seq_lens // multiple) * multiple
    cheapest = np.argsort(attention_costs(packs, seq_lens), kind="stable")
    # Whole units come out of it, at least about half full, and each new pack gets a sequence.
    left_over = len(packs) % unit
    num_spread = left_over + max(0, -(-(num_new - left_over) // unit)) * unit
    sequences_to_spare = np.cumsum(packs.counts()[cheapest] - 1)
    num_spread = max(num_spread, int(np.searchsorted(sequences_to_spare, num_new)) + 1)
    spread = packs.select(cheapest[:num_spread]).to_lists()
    evened = even_out(spread, aligned, len(spread) + num_new)
    rest = packs.select(np.sort(cheapest[num_spread:]))
    return rest.joined(Packs.from_lists(evened))


def even_out(packs: list[list[int]], seq_lens: np.ndarray, num_packs: int) -> list[list[int]]:
    """Spreads sequences over `num_packs` packs, moving one at a time from a fuller to the emptiest.

    packs: at most num_packs lists of sequence ids. A move lowers the fuller pack's tokens and never
    raises the other's above them, so no pack grows over the fullest one. Packs stay empty only when
    there are more packs than sequences.
    """
    by_length = [sorted(zip(seq_lens[ids].tolist(), ids, strict=True)) for ids in packs]
    by_length += [[] for _ in range(num_packs - len(packs))]
    tokens = [sum(length for length, _ in pairs) for pairs in by_length]
    fullest = [(-tokens[p], p) for p in range(num_packs)]
    emptiest = [(tokens[p], p) for p in range(num_packs)]
    heapq.heapify(fullest)
    heapq.heapify(emptiest)
    while fullest:
        load, giver = fullest[0]
        if -load != tokens[giver] or len(by_length[giver]) < 2:
            heapq.heappop(fullest)
            continue
        while emptiest[0][0] != tokens[emptiest[0][1]]:
            heapq.heappop(emptiest)
        taker = emptiest[0][1]
        gap = tokens[giver] - tokens[taker]
        # the move that evens the two out most, or the shortest sequence
        place = max(bisect_right(by_length[giver], (gap // 2 + 1,)) - 1, 0)
        length = by_length[giver][place][0]
        if length >= gap:
            heapq.heappop(fullest)
            continue
        insort(by_length[taker], by_length[giver].pop(place))
        for changed, change in ((giver, -length), (taker, length)):
            tokens[changed] += change
            heapq.heappush(fullest, (-tokens[changed], changed))
            heapq.heappush(emptiest, (tokens[changed], changed))
    return [[index for _, index in pairs] for pairs in by_length]


def _replace_fillers(
    packs: list[Packs], seq_lens: np.ndarray, pack_lens: np.ndarray, multiples: np.ndarray
) -> list[Packs]:
    """Gives each empty pack a sequence of another level's pack that has several, longest first."""
    packs = list(packs)
    for level in range(len(packs)):
        for giver in reversed(range(len(packs))):
            empty = np.flatnonzero(packs[level].counts() == 0)
            if giver == level or len(empty) == 0:
                continue
            multiple = multiples[level]
            moved = _to_spare(
                packs[giver], seq_lens, int(pack_lens[level] // multiple * multiple), len(empty)
            )
            ids = packs[giver].sequence_ids
            kept = np.ones(len(ids), dtype=bool)
            kept[moved] = False
            pack_of = np.repeat(np.arange(len(packs[giver])), packs[giver].counts())
            counts = np.bincount(pack_of[kept], minlength=len(packs[giver]))
            packs[giver] = Packs(ids[kept], offsets_of(counts))
            full = packs[level].select(np.flatnonzero(packs[level].counts() > 0))
            singles = [[i] for i in ids[moved]] + [[]] * (len(empty) - len(moved))
            packs[level] = full.joined(Packs.from_lists(singles))
    return packs


def _to_spare(packs: Packs, seq_lens: np.ndarray, limit: int, num_wanted: int) -> np.ndarray:
    """Places in sequence_ids of at most `num_wanted` sequences of at most `limit` tokens.

    Each pack keeps its longest sequence.
    """
    lens = seq_lens[packs.sequence_ids]
    pack_of = np.repeat(np.arange(len(packs)), packs.counts())
    by_length = np.lexsort((-lens, pack_of))  # the longest of each pack first
    first = packs.offsets[:-1][packs.counts() > 0]
    spare = np.ones(len(lens), dtype=bool)
    spare[by_length[first]] = False
    return np.flatnonzero(spare & (lens <= limit))[:num_wanted]
