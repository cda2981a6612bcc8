"""Timeline: where the time of every rank goes in every step of a run, and who waits for whom.

Guarantees (asserted by tests/unit/test_simulate.py):
- of every rank in every step, compute + communication + wait + bubble + reduction = seconds;
- what ranks wait is charged to the ranks they wait for, second by second.
It is made by simulate.simulate().
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_hbp.cost_model import CostModel
from megatron_hbp.level import Level
from megatron_hbp.measured import Comparison, compare_with_log
from megatron_hbp.plan import Plan
from megatron_hbp.rank_work import COMMUNICATION, TERMS


@dataclass(frozen=True)
class LevelSeconds:
    """What the micro-batches of a level take, in rank-seconds of the whole run.

    terms: seconds of work by name (TERMS). neighbour, bubble: waited before or in them, for ranks
    and for other stages. filler: the part of the work that is done on fillers. tokens: real ones.
    In a micro-batch of unlike CP sizes, work belongs to the level of its pack, waits to the
    longest one's.
    """

    level: Level
    num_microbatches: int
    tokens: int
    terms: dict[str, float]
    filler: float
    neighbour: float
    bubble: float


@dataclass(frozen=True)
class Waits:
    """Rank-seconds in which nothing is done, over the whole run.

    by_cause: "neighbour" (a slower rank of the same pack or of the same experts), "reduction" (the
    slowest rank of the step), "pipeline" (fill, stalls and drain). by_level: the first and the last
    by level. by_step: float64 [steps]. by_rank: float64 [ranks], waited by the rank, pipeline
    included. charged: float64 [ranks], waited by others for the rank; pipeline waits are nobody's.
    """

    by_cause: dict[str, float]
    by_level: dict[str, dict[str, float]]
    by_step: np.ndarray
    by_rank: np.ndarray
    charged: np.ndarray

    def worst_steps(self, count: int = 5) -> np.ndarray:
        """int64 [count or fewer]: the steps with most waiting, the worst first."""
        return np.argsort(-self.by_step, kind="stable")[:count]

    def worst_ranks(self, count: int = 5) -> np.ndarray:
        """int64 [count or fewer]: the ranks that others wait for most, the worst first."""
        return np.argsort(-self.charged, kind="stable")[:count]


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """Seconds of every rank in every step. A rank is a whole replica: its stages' mean.

    compute, communication: float64 [steps, ranks], in packs, fillers included. wait: [steps,
    ranks], for other ranks; step_wait: the part of it at the end of the step. bubble: [steps,
    ranks], for other stages. reduction: [steps], gradients and weights between ranks. seconds:
    [steps].
    last_stage: [steps, ranks], from the first forward to the last backward of the last stage.
    microbatch_seconds: [micro-batches, ranks], compute and communication of a stage.
    charged: [ranks], what others waited for the rank inside micro-batches.
    tokens, squares: int64 [steps], real tokens and sums of squared lengths.
    plan: what was simulated, None for another placement.
    """

    cost: CostModel
    plan: Plan | None
    compute: np.ndarray
    communication: np.ndarray
    wait: np.ndarray
    step_wait: np.ndarray
    bubble: np.ndarray
    reduction: np.ndarray
    seconds: np.ndarray
    last_stage: np.ndarray
    microbatch_seconds: np.ndarray
    charged: np.ndarray
    tokens: np.ndarray
    squares: np.ndarray
    by_level: tuple[LevelSeconds, ...]

    @property
    def num_steps(self) -> int:
        return len(self.seconds)

    @property
    def total_seconds(self) -> float:
        return float(self.seconds.sum())

    @property
    def gpu_days(self) -> float:
        """World size x seconds / 86400."""
        return self.cost.layout.world_size * self.total_seconds / 86400

    @property
    def tokens_per_gpu_second(self) -> float:
        """Real tokens a second and GPU."""
        gpu_seconds = self.cost.layout.world_size * self.total_seconds
        return int(self.tokens.sum()) / gpu_seconds if gpu_seconds else 0.0

    @property
    def model_flops_utilization(self) -> float:
        """MFU: FLOPs of real tokens, forward and backward without recompute, over the peak."""
        model = self.cost.model
        forward = model.matmul_flops_per_token() * int(self.tokens.sum())
        forward += model.attention_flops_per_square() * int(self.squares.sum())
        available = self.cost.device.peak_flops * self.cost.layout.world_size * self.total_seconds
        return 3 * forward / available if available else 0.0

    def shares(self) -> dict[str, float]:
        """The shares of all ranks' time, adding up to 1: see SHARES."""
        terms = {name: sum(level.terms[name] for level in self.by_level) for name in TERMS}
        ranks = self.wait.shape[1]
        parts = {
            "compute": float(self.compute.sum()),
            **{name: terms[name] for name in COMMUNICATION},
            "wait": float(self.wait.sum()),
            "bubble": float(self.bubble.sum()),
            "reduction": float(self.reduction.sum()) * ranks,
        }
        total = self.total_seconds * ranks
        return {name: part / total if total else 0.0 for name, part in parts.items()}

    def waits(self) -> Waits:
        """Who waits for whom."""
        idle = self.wait + self.bubble
        step_wait = self.step_wait.sum(axis=1)
        slowest = np.argmin(self.step_wait, axis=1)  # the first rank that waits for nobody
        at_end = np.bincount(slowest, weights=step_wait, minlength=self.wait.shape[1])
        return Waits(
            by_cause={
                "neighbour": float((self.wait - self.step_wait).sum()),
                "pipeline": float(self.bubble.sum()),
                "reduction": float(step_wait.sum()),
            },
            by_level={
                str(level.level): {"neighbour": level.neighbour, "pipeline": level.bubble}
                for level in self.by_level
            },
            by_step=idle.sum(axis=1),
            by_rank=idle.sum(axis=0),
            charged=self.charged + at_end,
        )

    def against_log(self, folder: str | Path) -> Comparison:
        """Predicted beside measured, from the files of --hbp-step-log: see measured.py.

        Raises ValueError when the time line is of no plan, or the folder holds no log of it.
        """
        if self.plan is None:
            raise ValueError(
                "only the time line of a plan can be held against a step log; simulate the plan "
                "that was trained"
            )
        return compare_with_log(self, self.plan, folder)
