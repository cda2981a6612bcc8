"""What a pack costs a rank: linear, quadratic and fixed terms, shared by the CP ranks of the pack.

Guarantees (asserted by tests/unit/test_cost.py):
- pure: numbers in, numbers out; nothing here looks at hardware;
- the cost of a pack does not depend on the order of its sequences.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class PackCost:
    """Cost per rank = (fixed x sequences + linear x tokens + quadratic x sum of squared lengths)
    / cp_size, plus communication x tokens / cp_size when cp_size is above 1.

    The unit is the caller's: seconds, FLOPs, or tokens' worth of matrix products. Every term is
    finite and 0 or more, and one of fixed, linear and quadratic is above 0; else ValueError.
    """

    fixed: float = 0.0
    linear: float = 0.0
    quadratic: float = 0.0
    communication: float = 0.0

    def __post_init__(self) -> None:
        terms = (self.fixed, self.linear, self.quadratic, self.communication)
        if not all(math.isfinite(term) and term >= 0 for term in terms):
            raise ValueError(f"{self}: every term must be a finite number of 0 or more")
        if not any(terms[:3]):
            raise ValueError(f"{self}: fixed, linear or quadratic must be above 0")

    def work(self, counts: np.ndarray, tokens: np.ndarray, squares: np.ndarray) -> np.ndarray:
        """float64 [packs]: cost of each pack on one rank alone, without communication.

        counts, tokens, squares: [packs], sequences, their tokens, the sum of their squared lengths.
        """
        cost = np.zeros(len(tokens))
        for factor, of in ((self.fixed, counts), (self.linear, tokens), (self.quadratic, squares)):
            if factor > 0:
                cost += factor * of
        return cost

    def per_rank(
        self, counts: np.ndarray, tokens: np.ndarray, squares: np.ndarray, cp_sizes: np.ndarray
    ) -> np.ndarray:
        """float64 [packs]: cost of each pack for each rank that works on it.

        counts, tokens, squares: as for work(). cp_sizes: int [packs], ranks that share the pack.
        """
        cost = self.work(counts, tokens, squares)
        if self.communication > 0:
            cost += np.where(cp_sizes > 1, self.communication * tokens, 0.0)
        return cost / cp_sizes


# The cost behind the attention balance ratio of the paper.
ATTENTION = PackCost(quadratic=1.0)
# Seconds of a rank for an 8B dense model on an H100 at 400 TFLOP/s, all-to-alls included.
DENSE_8B_H100 = PackCost(linear=48e9 / 4e14, quadratic=0.92e6 / 4e14, communication=3e-6)
