"""Predicted time of an epoch for a set of levels, from a histogram of lengths, without a plan.

It follows what the planner does with the lengths: a sequence goes to the shortest chosen level that
holds it, longer levels are filled with shorter sequences, a level gets whole micro-batches, the
epoch whole steps.

Guarantees (asserted by tests/unit/test_epoch_time.py):
- an epoch is built from the longest level down, one level at a time, so that sets of levels which
  start alike share the work (select.py searches that tree);
- the time is close to that of a real plan, simulated.

What is approximated:
- attention is balanced inside micro-batches, as the planner balances it: a micro-batch takes the
  mean of its packs, and a whole level (heaviest - lightest pack) x (r - 1) / 2r more in all, r
  being the packs of a micro-batch (packs are sorted by cost and neighbours share a micro-batch);
- with pipeline stages, micro-batches of a step are alike (mixing `auto`): every step runs one
  level, but for one step at each change of level, which waits for the longer one; an epoch of few
  steps has no choice, so the heaviest micro-batch of all counts the more, the fewer there are;
- free space of longer packs takes the next shorter sequences at random, as many as fit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np

from megatron_hbp.cost_model import CostModel, PackSeconds
from megatron_hbp.histogram import LengthHistogram, Sums
from megatron_hbp.level import Level
from megatron_hbp.rank_work import in_lockstep

_PACK_TERMS = tuple(field.name for field in fields(PackSeconds))
TERMS = (*_PACK_TERMS, "waiting", "pipeline", "reduction")
_WAITING, _PIPELINE, _REDUCTION = range(len(_PACK_TERMS), len(TERMS))


@dataclass(frozen=True, eq=False)
class LevelTime:
    """Seconds of a micro-batch of one level on a rank: linear in what its packs hold.

    base: float64 [TERMS], without any sequence. per: float64 [TERMS, 3], for each sequence, token
    and squared token of a pack. num_replicas: packs of a micro-batch.
    """

    level: Level
    num_replicas: int
    base: np.ndarray
    per: np.ndarray

    @classmethod
    def of(cls, level: Level, cost: CostModel) -> "LevelTime":
        full = np.diag([float(level.pack_len), float(level.pack_len), float(level.pack_len) ** 2])
        probes = np.concatenate([np.zeros((1, 3)), full])
        seconds = cost.pack_seconds(level, *probes.T)
        terms = np.zeros((len(TERMS), 4))
        for index, name in enumerate(_PACK_TERMS):
            terms[index] = getattr(seconds, name)
        return cls(
            level,
            cost.layout.num_ranks // level.cp_size,
            terms[:, 0],
            (terms[:, 1:] - terms[:, :1]) / full.diagonal(),
        )

    def content(self, sums: Sums) -> np.ndarray:
        """float64 [TERMS]: what sequences add to the time of the micro-batches that hold them."""
        return self.per @ (sums.sequences, sums.tokens, sums.squares) / self.num_replicas

    def heaviest(self, longest: int) -> float:
        """Seconds of a micro-batch with as many sequences of `longest` tokens as its packs hold."""
        return float(self.base.sum() + self.per[:, 2].sum() * self.squares_of(longest))

    def squares_of(self, length: int) -> float:
        """Sum of squared lengths of a pack with as many sequences of `length` as it holds."""
        return float(length) ** 2 * max(1, self.level.pack_len // max(1, length))


@dataclass(frozen=True, eq=False)
class Epoch:
    """An epoch in the making: levels longest first, of which the last is not settled yet.

    seconds: float64 [TERMS], of the settled levels and the sequences that are placed. bound: of the
    sequences those of at most so many tokens remain. spill: tokens of them that fill packs of level
    `filled`. microbatches, busy, own_packs: of each settled level, its micro-batches, their seconds
    and the packs that its own sequences need. heaviest: seconds of the heaviest micro-batch.
    cp_tokens: tokens in packs with CP above 1.
    """

    levels: tuple[LevelTime, ...]
    bound: int
    seconds: np.ndarray
    spill: float = 0.0
    filled: int = 0
    microbatches: tuple[int, ...] = ()
    busy: tuple[float, ...] = ()
    own_packs: tuple[int, ...] = ()
    heaviest: float = 0.0
    cp_tokens: float = 0.0

    @property
    def total(self) -> float:
        return float(self.seconds.sum())


class EpochTimes:
    """Epochs of one histogram under one cost model."""

    def __init__(self, histogram: LengthHistogram, cost: CostModel) -> None:
        self.histogram = histogram
        self.cost = cost
        layout = cost.layout
        self.num_microbatches = layout.num_microbatches
        one = np.ones((layout.num_microbatches, 1))  # equal ranks are as one
        at_1, at_2 = (cost.step_seconds(one * seconds).total for seconds in (1.0, 2.0))
        # a step of equal micro-batches takes slope x their time + reduction
        self._slope = at_2 - at_1
        self._reduction = 2 * at_1 - at_2
        self._lockstep = in_lockstep(cost)
        self._packs: dict[tuple[int, int], int] = {}

    def start(self, longest: LevelTime) -> Epoch:
        """An epoch with its longest level. The level holds every sequence."""
        return Epoch((longest,), self.histogram.longest, np.zeros(len(TERMS)))

    def with_shorter(self, epoch: Epoch, shorter: LevelTime) -> Epoch:
        """The epoch with one more level. The level before may turn out to have no micro-batch."""
        settled = self._settle(epoch, shorter.level.pack_len)
        return replace(settled, levels=(*settled.levels, shorter))

    def finish(self, epoch: Epoch) -> Epoch:
        """The epoch with its last level settled and in whole steps."""
        settled = self._settle(epoch, 0)
        num_microbatches = sum(settled.microbatches)
        num_steps = -(-num_microbatches // self.num_microbatches)
        missing = num_steps * self.num_microbatches - num_microbatches
        last = settled.levels[-1]
        seconds = settled.seconds + missing * last.base
        microbatches = (*settled.microbatches[:-1], settled.microbatches[-1] + missing)
        busy = (*settled.busy[:-1], settled.busy[-1] + missing * float(last.base.sum()))
        filling = self._slope - self.num_microbatches
        mean = sum(busy) / sum(microbatches)
        unlike = _changes(settled)
        unlike += max(0.0, settled.heaviest - mean - unlike) / num_steps
        seconds[_PIPELINE] += filling * (num_steps * mean + unlike)
        seconds[_REDUCTION] += self._reduction * num_steps
        return replace(settled, seconds=seconds, microbatches=microbatches, busy=busy)

    def with_waiting(
        self,
        epoch: Epoch,
        waiting: Callable[[LengthHistogram, LevelTime, int, bool], tuple[float, float]],
    ) -> Epoch:
        """A finished epoch of one level whose packs are not balanced: see static_packing.py."""
        num_steps = epoch.microbatches[0] // self.num_microbatches
        waited, above = waiting(
            self.histogram, epoch.levels[0], self.num_microbatches, self._lockstep
        )
        filling = self._slope - self.num_microbatches
        seconds = epoch.seconds.copy()
        busy = epoch.busy[0] - seconds[_WAITING] + num_steps * waited
        seconds[_PIPELINE] = filling * (busy / self.num_microbatches + num_steps * above)
        seconds[_WAITING] = num_steps * waited
        return replace(epoch, seconds=seconds)

    def _settle(self, epoch: Epoch, above: int) -> Epoch:
        """Gives the last level its sequences of more than `above` tokens and its micro-batches."""
        time = epoch.levels[-1]
        capacity = time.level.pack_len
        own = self.histogram.between(above, min(epoch.bound, capacity))
        taken = min(epoch.spill, own.tokens)
        share = taken / own.tokens if own.tokens else 0.0
        seconds, cp_tokens, busy = epoch.seconds.copy(), epoch.cp_tokens, list(epoch.busy)
        if taken:  # they fill packs of a longer level
            longer = epoch.levels[epoch.filled]
            added = longer.content(own.times(share))
            seconds += added
            busy[epoch.filled] += float(added.sum())
            cp_tokens += taken if longer.level.cp_size > 1 else 0.0
        packs = math.ceil(self._packs_needed(above, capacity) * (1.0 - share))
        microbatches = -(-packs // time.num_replicas)
        spill, filled, heaviest = epoch.spill - taken, epoch.filled, epoch.heaviest
        busy.append(0.0)
        if microbatches:
            mine = own.times(1.0 - share)
            added = microbatches * time.base + time.content(mine)
            added[_WAITING] += self._unlike(time, above)
            seconds += added
            busy[-1] = float(added.sum())
            heaviest = max(heaviest, time.heaviest(self.histogram.extremes(above, capacity)[1]))
            cp_tokens += mine.tokens if time.level.cp_size > 1 else 0.0
            free = microbatches * time.num_replicas * capacity - mine.tokens
            spill = min(free, self.histogram.between(0, above).tokens)
            filled = len(epoch.microbatches)
        return replace(
            epoch,
            bound=above,
            seconds=seconds,
            spill=spill,
            filled=filled,
            microbatches=(*epoch.microbatches, microbatches),
            busy=tuple(busy),
            own_packs=(*epoch.own_packs, packs),
            heaviest=heaviest,
            cp_tokens=cp_tokens,
        )

    def _packs_needed(self, above: int, capacity: int) -> int:
        key = (above, capacity)
        if key not in self._packs:
            self._packs[key] = self.histogram.packs_needed(above, capacity)
        return self._packs[key]

    def _unlike(self, time: LevelTime, above: int) -> float:
        """Seconds that the ranks of a level wait because the packs of a micro-batch differ."""
        capacity = time.level.pack_len
        shortest, longest = self.histogram.extremes(above, capacity)
        heaviest, lightest = map(time.squares_of, (longest, shortest))
        spread = max(0.0, heaviest - lightest) * float(time.per[:, 2].sum())
        if not self._lockstep:  # ranks wait at the end of a step, in which replicas take turns
            spread /= self.num_microbatches
        return spread * (time.num_replicas - 1) / (2 * time.num_replicas)


def _changes(epoch: Epoch) -> float:
    """Seconds that the longest micro-batch is above the mean, in steps that hold two levels."""
    times = [
        busy / num for busy, num in zip(epoch.busy, epoch.microbatches, strict=True) if num > 0
    ]
    return sum(abs(longer - shorter) / 2 for longer, shorter in pairwise(times))
