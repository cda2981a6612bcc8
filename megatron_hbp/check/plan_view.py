"""A plan as the ranks see it: which pack and level each place trains in each micro-batch, hashed.

Guarantees (asserted by tests/unit/test_lockstep.py and test_lockstep_plans.py):
- equal hashes mean equal packs (their sequences and lengths) at equal levels in the same order;
- a plan that would make ranks disagree is described in sentences, with step and micro-batch.
"""

import hashlib

import numpy as np

from megatron_hbp.check.rank_layout import RankLayout
from megatron_hbp.level import check_levels
from megatron_hbp.plan import Plan

_PACKS_AT_ONCE = 1 << 20
_ROWS_AT_ONCE = 1 << 14
_MOST_SENTENCES = 3


def mixed(words: np.ndarray) -> np.ndarray:
    """uint64, same shape: splitmix64's finisher, so that equal sums mean equal words."""
    state = words + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def text_hash(text: str) -> np.uint64:
    """64 bits of a text."""
    return np.uint64(
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    )


def plan_problems(plan: Plan, layout: RankLayout) -> list[str]:
    """What of a plan would make ranks disagree, or stop, whatever the model; none when good."""
    try:
        check_levels(plan.levels, layout.num_ranks)
    except ValueError as error:
        return [str(error)]
    if plan.num_ranks != layout.num_ranks:
        return [
            f"the plan is for {plan.num_ranks} ranks, the run has {layout.num_ranks} (GPUs / (TP x "
            f"PP)); plan again with --ranks {layout.num_ranks}"
        ]
    stages, microbatches = layout.num_stages, plan.num_microbatches
    if layout.num_virtual_stages > 1 and microbatches % stages:
        return [
            f"{microbatches} micro-batches a step are no multiple of {stages} pipeline stages, "
            f"which virtual stages need; use {-(-microbatches // stages) * stages}"
        ]
    levels, offsets = plan.microbatch_level, plan.microbatch_offsets
    total = plan.num_steps * microbatches
    if len(levels) != total or len(offsets) != total + 1:
        return [
            f"the plan has {len(levels)} micro-batches with {len(offsets) - 1} lists of packs for "
            f"{plan.num_steps} steps of {microbatches}; steps would be unequal; plan again"
        ]
    wrong = np.flatnonzero((levels < 0) | (levels >= len(plan.levels)))
    if len(wrong):
        return [
            f"step {wrong[0] // microbatches}, micro-batch {wrong[0] % microbatches}: level "
            f"{levels[wrong[0]]} of {len(plan.levels)}; plan again"
        ]
    return _pack_problems(plan)


def _pack_problems(plan: Plan) -> list[str]:
    """Micro-batches with another number of packs than ranks / CP."""
    sizes = np.array([level.cp_size for level in plan.levels], dtype=np.int64)
    wanted = (plan.num_ranks // sizes)[plan.microbatch_level]
    given = np.diff(plan.microbatch_offsets)
    wrong = np.flatnonzero(given != wanted)
    found = []
    for place in wrong[:_MOST_SENTENCES]:
        step, microbatch = divmod(int(place), plan.num_microbatches)
        level = plan.levels[plan.microbatch_level[place]]
        cp_size = level.cp_size
        if given[place] < wanted[place]:
            first = int(given[place]) * cp_size
            then = f"ranks {first} to {plan.num_ranks - 1} would train packs of the next one"
        else:
            then = f"{given[place] - wanted[place]} would be trained by nobody"
        found.append(
            f"step {step}, micro-batch {microbatch} of level {level}: {given[place]} packs, "
            f"{plan.num_ranks} ranks need {wanted[place]}: {then}; plan again"
        )
    if len(wrong) > _MOST_SENTENCES:
        found.append(
            f"{len(wrong) - _MOST_SENTENCES} more micro-batches have too few or too many packs"
        )
    return found or _array_problems(plan)


def _array_problems(plan: Plan) -> list[str]:
    """Packs that are not those of the micro-batches, or not runs of sequences."""
    packs, ids = int(plan.microbatch_offsets[-1]), int(plan.pack_offsets[-1])
    if (packs, ids) != (plan.num_packs, len(plan.sequence_ids)):
        return [
            f"the plan's micro-batches name {packs} packs with {ids} sequences, it holds "
            f"{plan.num_packs} with {len(plan.sequence_ids)}; plan again"
        ]
    for start in range(0, plan.num_packs, _PACKS_AT_ONCE):
        falls = np.flatnonzero(np.diff(plan.pack_offsets[start : start + _PACKS_AT_ONCE + 1]) < 0)
        if len(falls):
            return [f"pack {start + falls[0]} ends before it starts; plan again"]
    for start in range(0, len(plan.sequence_ids), _PACKS_AT_ONCE):
        part = plan.sequence_ids[start : start + _PACKS_AT_ONCE]
        if part.min() < 0 or part.max() >= len(plan.seq_lens):
            return [
                f"the plan names sequence {part.min() if part.min() < 0 else part.max()} of "
                f"{len(plan.seq_lens)}; plan again"
            ]
    return _too_long(plan)


def _too_long(plan: Plan) -> list[str]:
    """Packs that their ranks cannot build: these would stop, and all others wait for them."""
    level_of = plan.pack_level()
    capacity = np.array([level.pack_len for level in plan.levels], dtype=np.int64)
    multiples = np.array(plan.alignment.document_multiples, dtype=np.int64)
    for start in range(0, plan.num_packs, _PACKS_AT_ONCE):
        bounds = np.asarray(plan.pack_offsets[start : start + _PACKS_AT_ONCE + 1], dtype=np.int64)
        ids = plan.sequence_ids[bounds[0] : bounds[-1]]
        levels = level_of[start : start + _PACKS_AT_ONCE]
        multiple = np.repeat(multiples[levels], np.diff(bounds))
        aligned = -(-plan.seq_lens[ids].astype(np.int64) // multiple) * multiple
        used = np.diff(np.concatenate([[0], np.cumsum(aligned)])[bounds - bounds[0]])
        wrong = np.flatnonzero(used > capacity[levels])
        if len(wrong):
            pack = int(start + wrong[0])
            at = int(np.searchsorted(plan.microbatch_offsets, pack, side="right")) - 1
            step, microbatch = divmod(at, plan.num_microbatches)
            return [
                f"step {step}, micro-batch {microbatch}: pack {pack} has {used[wrong[0]]} tokens, "
                f"its level {plan.levels[level_of[pack]]} takes {capacity[level_of[pack]]}; plan "
                "again"
            ]
    return []


class PlanView:
    """A plan without plan_problems(), seen by `num_ranks` places."""

    def __init__(self, plan: Plan, num_ranks: int) -> None:
        self.plan = plan
        self._num_ranks = num_ranks
        self._sizes = np.array([level.cp_size for level in plan.levels], dtype=np.int64)
        self._level_names = np.array([text_hash(str(level)) for level in plan.levels])
        self._by_size = self._hash_packs()

    def level_of_step(self) -> np.ndarray:
        """int16 [steps, micro-batches]: the level of each micro-batch."""
        return self.plan.microbatch_level.reshape(-1, self.plan.num_microbatches)

    def ordered(self, words: np.ndarray, ending: np.uint64) -> np.uint64:
        """One hash of words [steps, actions] in order, with an `ending` after each step.

        Words of 0 are nothing: they take no place in the order.
        """
        filled = words != 0
        places = np.cumsum(filled, dtype=np.uint64).reshape(words.shape)
        total = mixed(words ^ mixed(places))[filled].sum(dtype=np.uint64)
        return mixed(np.array([total ^ ending ^ np.uint64(len(words))], dtype=np.uint64))[0]

    def pack_hashes(self, cp_size: int | None = None) -> np.ndarray:
        """uint64 [places]: of each place's packs in order; of one CP size only, or of all."""
        found = np.zeros(self._num_ranks, dtype=np.uint64)
        for size, hashes in self._by_size.items():
            if cp_size in (None, size):
                found += np.repeat(hashes, size)
        return found

    def first_difference(
        self, place: int, other: "PlanView", other_place: int, *, packs: bool, cp_size: int | None
    ) -> int | None:
        """The first micro-batch (of the whole plan) that two places do not train alike.

        packs: compare packs, too, not levels alone. cp_size: only where one of them has this size.
        """
        mine, theirs = self.plan.microbatch_level, other.plan.microbatch_level
        num = min(len(mine), len(theirs))
        for start in range(0, num, _ROWS_AT_ONCE):
            rows = np.arange(start, min(num, start + _ROWS_AT_ONCE))
            differ = self._trained(rows, place, packs) != other._trained(rows, other_place, packs)
            if cp_size is not None:
                differ &= (self._sizes[mine[rows]] == cp_size) | (
                    other._sizes[theirs[rows]] == cp_size
                )
            if differ.any():
                return start + int(np.flatnonzero(differ)[0])
        return num if len(mine) != len(theirs) else None

    def described(self, microbatch: int, place: int) -> str:
        """What a place trains in a micro-batch of the whole plan, in words."""
        if microbatch >= len(self.plan.microbatch_level):
            return "nothing (its plan has ended)"
        pack, cp_rank = self.plan.pack_index(microbatch, place)
        ids = self.plan.pack(pack)
        held = "a filler" if not len(ids) else f"{len(ids)} sequences from {ids[0]} on"
        level = self.plan.levels[self.plan.microbatch_level[microbatch]]
        return f"level {level}, pack {pack} ({held}), CP rank {cp_rank}"

    def _trained(self, rows: np.ndarray, place: int, packs: bool) -> np.ndarray:
        """uint64: level, and pack, of a place in micro-batches."""
        levels = self.plan.microbatch_level[rows]
        found = self._level_names[levels]
        if packs:
            indices = self.plan.microbatch_offsets[rows] + place // self._sizes[levels]
            found = found ^ self._fingerprints(indices)
        return found

    def _hash_packs(self) -> dict[int, np.ndarray]:
        """Of each CP size uint64 [replicas]: packs of each replica with their micro-batch."""
        plan = self.plan
        found = {
            level.cp_size: np.zeros(self._num_ranks // level.cp_size, dtype=np.uint64)
            for level in plan.levels
        }
        offsets, levels = plan.microbatch_offsets, plan.microbatch_level
        start, num = 0, len(levels)
        while start < num:
            last = int(np.searchsorted(offsets, offsets[start] + _PACKS_AT_ONCE, side="right")) - 1
            stop = min(num, max(last, start + 1))
            hashes = self._fingerprints(np.arange(offsets[start], offsets[stop]))
            first = offsets[start:stop] - offsets[start]
            for index, level in enumerate(plan.levels):
                rows = np.flatnonzero(levels[start:stop] == index)
                replicas = len(found[level.cp_size])
                packs = hashes[first[rows][:, None] + np.arange(replicas)]
                names = mixed((rows + start).astype(np.uint64) ^ self._level_names[index])
                found[level.cp_size] += mixed(packs ^ names[:, None]).sum(axis=0, dtype=np.uint64)
            start = stop
        return found

    def _fingerprints(self, packs: np.ndarray) -> np.ndarray:
        """uint64 [packs]: of packs by index, their sequences and kept lengths in order."""
        starts = np.asarray(self.plan.pack_offsets[packs], dtype=np.int64)
        counts = np.asarray(self.plan.pack_offsets[packs + 1], dtype=np.int64) - starts
        ends = np.cumsum(counts)
        place = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        ids = self.plan.sequence_ids[np.repeat(starts, counts) + place]
        words = ids.astype(np.uint64) ^ (self.plan.seq_lens[ids].astype(np.uint64) << np.uint64(32))
        words = mixed(words ^ mixed(place.astype(np.uint64)))
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(words, dtype=np.uint64)])
        return sums[ends] - sums[ends - counts]
