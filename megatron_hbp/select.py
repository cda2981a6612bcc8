"""Levels for a model, a cluster and the lengths of a corpus: the fastest that fit.

The search goes over token budgets S and sets of CP sizes. For one S it is a dynamic program over
CP sizes from the longest level down (epoch_time.py): the states of a CP size are the epochs whose
shortest level so far it is, and of these only those live on that no other beats both in seconds and
in the tokens it has taken from shorter levels. Recompute is the least that fits in memory.

Guarantees (asserted by tests/unit/test_select.py):
- no candidate that was looked at is predicted to be faster by more than LEVEL_PRICE for each level
  that it has more; each one that lost is in `rejected` with the reason;
- the same arguments give the same levels;
- a run that nothing fits is a ValueError that says what would.
The choice of the HBP paper is paper_levels.py.
"""

from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from megatron_hbp.candidates import Candidates, allowed_cp_sizes, round_budget, token_budgets
from megatron_hbp.cost_model import CostModel
from megatron_hbp.epoch_time import TERMS, Epoch, EpochTimes, LevelTime
from megatron_hbp.histogram import LengthHistogram
from megatron_hbp.level import Level
from megatron_hbp.paper_levels import PaperSelection, paper_levels
from megatron_hbp.prediction import Prediction, predict, prediction_of
from megatron_hbp.static_packing import waiting_seconds

__all__ = [
    "Candidates",
    "PaperSelection",
    "Prediction",
    "Rejected",
    "Selection",
    "best_levels",
    "paper_levels",
    "predict",
]


# The share of an epoch that each level after the first must save: it costs process groups, their
# buffers and a warm-up.
LEVEL_PRICE = 0.0005


@dataclass(frozen=True)
class Rejected:
    """A candidate that lost. levels: empty where a CP size or a budget was refused as a whole.
    seconds: of an epoch, None where it was not predicted. subject, reason: in words.
    """

    levels: tuple[Level, ...]
    seconds: float | None
    subject: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Selection:
    """best: what was chosen. static: the fastest single level as it is trained today, packs in
    random order; it is the smallest S that holds the longest sequence at its CP size. None when no
    such level fits in memory. rejected: the fastest first, then those without a prediction.
    """

    best: Prediction
    static: Prediction | None
    rejected: tuple[Rejected, ...]

    @property
    def levels(self) -> tuple[Level, ...]:
        return self.best.levels

    @property
    def seconds_per_epoch(self) -> float:
        return self.best.seconds

    @property
    def gpu_days(self) -> float:
        """Of one epoch."""
        return self.best.gpu_days


def best_levels(
    seq_lens: np.ndarray | LengthHistogram,
    cost: CostModel,
    candidates: Candidates | None = None,
) -> Selection:
    """The levels whose predicted epoch is shortest, each level after the first at LEVEL_PRICE.

    seq_lens: int32|int64 [n], tokens of each sequence, or their histogram. cost: of the run whose
    layout it holds. candidates: what may be chosen (None: everything that heads, ranks and memory
    allow). Raises ValueError for lengths without a token, and when no candidate fits, with the
    smallest S that would do.
    """
    candidates = candidates or Candidates()
    histogram = seq_lens if isinstance(seq_lens, LengthHistogram) else LengthHistogram(seq_lens)
    rejected: list[Rejected] = []
    cp_sizes, refused = allowed_cp_sizes(cost, candidates)
    rejected += [Rejected((), None, f"CP {size}", reason) for size, reason in refused]
    budgets = token_budgets(histogram, cost, candidates, cp_sizes)
    found: list[Prediction] = []
    for budget in budgets:
        times = EpochTimes(histogram, _for_budget(cost, candidates, budget))
        epochs, lost = _search(times, budget, cp_sizes)
        found += [prediction_of(times, epoch) for epoch in epochs]
        rejected += lost
    found.sort(key=lambda one: (_charged(one), [level.pack_len for level in one.levels]))
    if not found:  # budgets that memory allows but that do not hold the longest sequence
        raise ValueError(
            f"no candidate fits: {'; '.join(sorted({lost.reason for lost in rejected}))}; allow "
            "more CP sizes, or leave out or cut the longest sequences"
        )
    best, others = found[0], sorted(found[1:], key=attrgetter("seconds"))
    return Selection(
        best=best,
        static=_static(histogram, cost, candidates, cp_sizes),
        rejected=(*(_lost(best, other) for other in others), *rejected),
    )


def _charged(one: Prediction) -> float:
    """Seconds, and what the levels have to earn."""
    return one.seconds * (1 + LEVEL_PRICE * (len(one.levels) - 1))


def _for_budget(cost: CostModel, candidates: Candidates, budget: int) -> CostModel:
    """The run with as many micro-batches as make a step of the wanted tokens."""
    layout = cost.layout
    if candidates.tokens_per_step is None:
        return cost
    wanted = candidates.tokens_per_step / (budget * layout.num_ranks)
    unit = layout.num_stages if layout.num_virtual_stages > 1 else 1
    num_microbatches = max(1, round(wanted / unit)) * unit
    return replace(cost, layout=replace(layout, num_microbatches=num_microbatches))


def _search(
    times: EpochTimes, budget: int, cp_sizes: tuple[int, ...]
) -> tuple[list[Epoch], list[Rejected]]:
    """All sets of CP sizes of one budget that are not beaten on the way, and those that are."""
    longest = times.histogram.longest
    lost: list[Rejected] = []
    levels: list[LevelTime] = []
    for cp_size in cp_sizes:
        recompute = times.cost.least_recompute(budget * cp_size, cp_size)
        if recompute is None:
            lost.append(_too_large(times.cost, budget, cp_size))
        else:
            levels.append(LevelTime.of(Level(budget * cp_size, cp_size, recompute), times.cost))
    states: list[list[Epoch]] = [[] for _ in levels]
    finished: list[Epoch] = []
    for here in reversed(range(len(levels))):
        if levels[here].level.pack_len >= longest:
            states[here].append(times.start(levels[here]))
        alive, beaten = _unbeaten(states[here])
        lost += beaten
        for epoch in alive:
            done = times.finish(epoch)
            if done.microbatches[-1]:
                finished.append(done)
            else:
                lost.append(_rejected(done, f"no sequence needs {levels[here].level}"))
            for shorter in range(here):
                longer = times.with_shorter(epoch, levels[shorter])
                if longer.microbatches[-1]:
                    states[shorter].append(longer)
                else:
                    reason = f"no sequence needs {levels[here].level}"
                    lost.append(_rejected(longer, reason))
    if not finished and levels:
        most = levels[-1].level
        reason = f"the longest sequence has {longest} tokens, {most} holds {most.pack_len}"
        lost.append(Rejected((most,), None, str(most), reason))
    return finished, lost


def _too_large(cost: CostModel, budget: int, cp_size: int) -> Rejected:
    level = Level(budget * cp_size, cp_size, "full")
    needed, given = cost.memory(level).total / 2**30, cost.device.memory_bytes / 2**30
    reason = (
        f"does not fit in memory: {needed:.1f} GiB with every layer recomputed, of {given:.1f} GiB"
    )
    return Rejected((level,), None, str(level), reason)


def _unbeaten(epochs: list[Epoch]) -> tuple[list[Epoch], list[Rejected]]:
    """Those that no other beats in seconds, in tokens placed and in the number of levels."""
    alive: list[Epoch] = []
    beaten: list[Rejected] = []
    for epoch in sorted(epochs, key=attrgetter("total")):
        better = next(
            (
                other
                for other in alive
                if other.spill >= epoch.spill and len(other.levels) <= len(epoch.levels)
            ),
            None,
        )
        if better is not None:
            names = " ".join(str(time.level) for time in reversed(better.levels))
            beaten.append(
                _rejected(epoch, f"slower than {names} up to here, and leaves no less to do")
            )
        else:
            alive.append(epoch)
    return alive, beaten


def _rejected(epoch: Epoch, reason: str) -> Rejected:
    levels = tuple(time.level for time in reversed(epoch.levels))
    return Rejected(levels, None, " ".join(map(str, levels)), reason)


def _lost(best: Prediction, other: Prediction) -> Rejected:
    """Why a candidate that was predicted in full is not the best one."""
    more = {name: other.terms[name] - best.terms[name] for name in TERMS}
    cause = max(more, key=lambda name: more[name])
    reason = (
        f"{other.seconds - best.seconds:.1f} s more an epoch "
        f"({100 * (other.seconds / best.seconds - 1):.2f} %), most of it {cause.replace('_', ' ')}"
    )
    if other.seconds <= best.seconds:
        reason = (
            f"{best.seconds - other.seconds:.1f} s less an epoch, too little for "
            f"{len(other.levels)} levels instead of {len(best.levels)}"
        )
    for level, packs, whole in zip(other.levels, other.own_packs, other.whole_packs, strict=True):
        if 0 < packs <= whole // 2:
            reason += f"; {level} has {packs} packs of its own, whole micro-batches take {whole}"
    if other.padding > 0.1:
        reason += f"; {100 * other.padding:.0f} % padding: too few packs to fill a step"
    return Rejected(other.levels, other.seconds, " ".join(map(str, other.levels)), reason)


def _static(
    histogram: LengthHistogram, cost: CostModel, candidates: Candidates, cp_sizes: tuple[int, ...]
) -> Prediction | None:
    """The fastest single level as it is trained today."""
    found = []
    for cp_size in cp_sizes:
        budget = round_budget(histogram.longest / cp_size, candidates)
        recompute = cost.least_recompute(budget * cp_size, cp_size)
        if recompute is None:
            continue
        times = EpochTimes(histogram, _for_budget(cost, candidates, budget))
        time = LevelTime.of(Level(budget * cp_size, cp_size, recompute), times.cost)
        epoch = times.finish(times.start(time))
        found.append(prediction_of(times, times.with_waiting(epoch, waiting_seconds)))
    return min(found, key=attrgetter("seconds"), default=None)
