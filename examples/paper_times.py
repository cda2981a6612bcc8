"""The iteration times that the HBP paper publishes, as a profile and by what they are made of.

LLaMA-3.1-8B on 32 H100 (arXiv 2503.07680), means of 10 iterations, each with 16,384 tokens of a
rank. How attention is told from the rest: see paper_tables.py.
"""

import numpy as np

from megatron_hbp.cost_model import analytic
from megatron_hbp.hardware import find_device
from megatron_hbp.histogram import LengthHistogram
from megatron_hbp.level import Level
from megatron_hbp.micro_batch import ATTENTION_BACKWARD
from megatron_hbp.models import find_model
from megatron_hbp.profile import Point, Profile
from megatron_hbp.reduction import REDUCTION_OVERLAP
from megatron_hbp.run_layout import RunLayout

NUM_RANKS = 32
TOKENS = 16384  # of a rank in a published iteration

# Published seconds of an iteration by level; 32768:8:8 is in two tables, as 2.82 and 2.83.
PUBLISHED_SECONDS = {
    "8192:2:8": 2.69,
    "16384:1:28": 2.65,
    "32768:2:28": 3.01,
    "32768:4:23": 2.95,
    "32768:8:8": 2.825,
    "32768:16:0": 3.60,
    "65536:4:28": 3.01,
    "131072:8:28": 3.05,
}


def published_profile(lengths: LengthHistogram | None = None) -> Profile:
    """The published times as a profile of micro-batches.

    lengths: the packs held these, so that attention can be told (None: not said).
    """
    points = []
    for text, seconds in PUBLISHED_SECONDS.items():
        level = Level.parse(text)
        squares = None
        if lengths is not None:
            sums = lengths.between(0, level.pack_len)
            squares = sums.squares * level.pack_len / sums.tokens
        points.append(
            Point(
                level,
                seconds * level.tokens_per_rank / TOKENS,
                tokens=None if squares is None else level.pack_len,
                squares=squares,
            )
        )
    return Profile("llama-3.1-8b", "h100-80gb", RunLayout(num_ranks=NUM_RANKS), tuple(points))


class IterationTimes:
    """Seconds of an iteration of each level, by the attention of its slowest rank."""

    def __init__(self, long_samples: bool = True) -> None:
        """long_samples: published times are at each level's mean composition; else packs held
        samples of at most 16384 tokens when they were measured, whatever the level."""
        self._model = find_model("llama-3.1-8b")
        self._long_samples = long_samples
        self._seconds: dict[int, float] = {}
        self._linear: dict[int, float] = {}
        self._per_square = 0.0

    def calibrate(self, one_rank: Level, mean_squares: float) -> None:
        """mean_squares: of a rank in an iteration of `one_rank`, the published level with CP 1."""
        again = int(one_rank.recompute_layers) / self._model.num_layers
        linear = TOKENS * self._model.matmul_flops_per_token() * (3 + again)
        per_square = self._model.attention_flops_per_square() * (1 + ATTENTION_BACKWARD + again)
        speed = (linear + per_square * mean_squares) / PUBLISHED_SECONDS[str(one_rank)]
        self._per_square = per_square / speed
        self._mean_squares = mean_squares

    def set_level(self, level: Level, mean_squares: float) -> None:
        """mean_squares: of a rank in an iteration in which the level's time was measured."""
        squares = mean_squares if self._long_samples else self._mean_squares
        self._linear[level.cp_size] = PUBLISHED_SECONDS[str(level)] - self._per_square * squares

    def seconds(
        self, cp_size: int, largest_squares: np.ndarray, share: np.ndarray | float = 1.0
    ) -> np.ndarray:
        """share: of the 16384 tokens of a rank that there are."""
        return share * self._linear[cp_size] + self._per_square * largest_squares


def fixed_seconds(others: np.ndarray) -> np.ndarray:
    """float64 [iterations]: launches, and the reduction of gradients as far as it is not hidden.

    others: float64 [iterations], what the tokens take. Analytic: the backward, two thirds of it,
    hides no more of the reduction than it is long; published times hold both already.
    """
    cost = analytic(
        find_model("llama-3.1-8b"), find_device("h100-80gb"), RunLayout(num_ranks=NUM_RANKS)
    )
    launches = cost.device.launch_seconds * cost.model.num_layers
    reduction = cost.reduction_seconds / (1 - REDUCTION_OVERLAP)
    return launches + reduction - np.minimum(REDUCTION_OVERLAP * reduction, others * 2 / 3)
