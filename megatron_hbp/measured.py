"""Predicted beside measured: a time line and the step log of a run (--hbp-step-log).

Guarantees (asserted by tests/unit/test_measured.py):
- only steps that count are compared (see trained.py), and each against its own prediction;
- a prediction that is right but for a factor has correlation 1, and that factor as its scale.

A line of the log has the seconds from the first forward to the last backward of the last stage, so
the reduction is left out of both sides, and with pipeline stages the fill too. CPU seconds of
micro-batches are compared where there is one stage; they tell the work of a rank when it trains on
CPU and only the launching of kernels when it trains on a GPU.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_hbp.plan import Plan
from megatron_hbp.trained import LoggedStep, logged_steps

if TYPE_CHECKING:
    from megatron_hbp.timeline import Timeline


@dataclass(frozen=True)
class LevelComparison:
    """Seconds of a micro-batch of a level, means.

    predicted, measured: of the slowest rank, from the steps' times by least squares over how many
    micro-batches of each level they hold; NaN where the steps do not tell levels apart.
    predicted_rank, measured_cpu: of a rank, without waits; measured in CPU seconds. NaN where
    nothing is logged.
    """

    level: str
    num_microbatches: int
    predicted: float
    measured: float
    predicted_rank: float
    measured_cpu: float


@dataclass(frozen=True)
class Comparison:
    """steps: int64 [n], of the plan. predicted, measured: float64 [n], seconds of the slowest rank.

    scale: the median of measured / predicted. correlation: Pearson's, NaN with fewer than two steps
    or where one side does not vary. cpu_correlation: the same of predicted seconds and CPU seconds
    over the micro-batches of all ranks. problems: what is wrong with the log, in words.
    """

    steps: np.ndarray
    predicted: np.ndarray
    measured: np.ndarray
    by_level: tuple[LevelComparison, ...]
    scale: float
    correlation: float
    cpu_correlation: float
    problems: tuple[str, ...]

    @property
    def errors(self) -> np.ndarray:
        """float64 [n]: measured / (scale x predicted) - 1."""
        return self.measured / (self.scale * self.predicted) - 1.0

    def worst(self, count: int = 5) -> np.ndarray:
        """int64 [count or fewer]: places in `steps`, furthest from the scaled prediction first."""
        return np.argsort(-np.abs(self.errors), kind="stable")[:count]


def compare_with_log(timeline: "Timeline", plan: Plan, folder: str | Path) -> Comparison:
    """Reads the log of a run over `plan`. Raises ValueError when it holds none with times."""
    logged = logged_steps(folder, plan)
    size = plan.num_microbatches
    walls = np.full((min(logged.steps, plan.num_steps), len(logged.files)), np.nan)
    cpu_sums, rank_sums, counts = np.zeros((3, len(plan.levels)))
    pairs = []
    for step in range(len(walls)):
        levels = plan.microbatch_level[step * size : (step + 1) * size]
        for place, log in enumerate(logged.files):
            line = log[step]
            if line is None:
                continue
            walls[step, place] = line.wall_seconds
            cpu, predicted = _of_rank(line, timeline, step, size)
            known = np.isfinite(cpu)
            pairs.append(np.stack([predicted[known], cpu[known]]))
            np.add.at(cpu_sums, levels[known], cpu[known])
            np.add.at(rank_sums, levels[known], predicted[known])
            np.add.at(counts, levels[known], 1)
    steps = np.flatnonzero(np.isfinite(walls).all(axis=1))
    if not len(steps):
        raise ValueError(
            f"{folder} holds no step with the times of all ranks; name the folder of a run that "
            "ended at least one step"
        )
    measured = walls[steps].max(axis=1)
    predicted = timeline.last_stage[steps].max(axis=1)
    held = np.zeros((plan.num_steps, len(plan.levels)))
    at_step = np.arange(len(plan.microbatch_level)) // size
    np.add.at(held, (at_step, plan.microbatch_level), 1)
    fits = [_by_least_squares(held[steps], times) for times in (predicted, measured)]
    with np.errstate(invalid="ignore", divide="ignore"):
        rank, cpu = rank_sums / counts, cpu_sums / counts
    by_level = tuple(
        LevelComparison(
            level=str(level),
            num_microbatches=int(held[steps, index].sum()),
            predicted=float(fits[0][index]),
            measured=float(fits[1][index]),
            predicted_rank=float(rank[index]),
            measured_cpu=float(cpu[index]),
        )
        for index, level in enumerate(plan.levels)
    )
    return Comparison(
        steps=steps,
        predicted=predicted,
        measured=measured,
        by_level=by_level,
        scale=float(np.median(measured / predicted)),
        correlation=_correlation(predicted, measured),
        cpu_correlation=_correlation(*np.concatenate(pairs, axis=1)),
        problems=tuple(logged.problems),
    )


def _of_rank(
    line: LoggedStep, timeline: "Timeline", step: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """CPU seconds and predicted seconds of a rank's micro-batches, float64 [micro-batches]."""
    predicted = timeline.microbatch_seconds[step * size : (step + 1) * size, line.rank]
    if line.rank < 0 or timeline.cost.layout.num_stages > 1 or len(line.cpu_seconds) != size:
        return np.full(size, np.nan), predicted
    return np.array(line.cpu_seconds, dtype=np.float64), predicted


def _by_least_squares(held: np.ndarray, times: np.ndarray) -> np.ndarray:
    """float64 [levels]: seconds of a micro-batch of each, NaN where they cannot be told apart."""
    found = np.full(held.shape[1], np.nan)
    occurs = held.any(axis=0)
    answer, _, rank, _ = np.linalg.lstsq(held[:, occurs], times, rcond=None)
    if rank == np.count_nonzero(occurs):
        found[occurs] = answer
    return found


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    if len(left) < 2 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return float("nan")
    return float(np.corrcoef(left, right)[0, 1])
