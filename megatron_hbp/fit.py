"""Fitting factors on the terms of the cost model to measured times.

t = fixed a + linear b + attention c + intra d + inter e
    + r x (forward again: linear b + attention c + intra d + inter e)
with all of a, b, c, d, e, r 0 or more. Relative errors are minimised. A term that the points cannot
tell from the others keeps its analytic value, 1.

Guarantees (asserted by tests/unit/test_fit.py):
- from 40 points with 3 % noise the fit recovers the times of a known model to 5 %, and so the
  factors of linear and attention;
- a term that no point shows, or that moves with another one, is named and left at 1.
"""

from dataclasses import dataclass

import numpy as np

# A factor whose standard error is above this share of itself (or of 1) is not told by the points.
MAX_RELATIVE_ERROR = 0.3
_ROUNDS = 200


@dataclass(frozen=True)
class Term:
    """scale: the factor on the analytic term. error: its standard error; 0 when not fitted, or when
    there are no more points than factors."""

    scale: float
    error: float
    fitted: bool
    reason: str


@dataclass(frozen=True)
class FitReport:
    """residuals: float64 [points], predicted / measured - 1. labels: the points' levels."""

    residuals: np.ndarray
    labels: tuple[str, ...]
    terms: dict[str, Term]

    @property
    def worst(self) -> float:
        """The largest relative error."""
        return float(np.abs(self.residuals).max())

    @property
    def scales(self) -> dict[str, float]:
        return {name: term.scale for name, term in self.terms.items()}

    def lines(self) -> list[str]:
        """The report in words: terms, then the worst points."""
        lines = []
        num = len(self.residuals)
        exact = num <= sum(term.fitted for term in self.terms.values())
        for name, term in self.terms.items():
            how = f"+- {term.error:.2g}, fitted" if term.fitted else f"analytic: {term.reason}"
            if term.fitted and exact:
                how = "fitted, its error unknown: no more points than factors"
            lines.append(f"{name}: {term.scale:.3g} x analytic ({how})")
        rms = float(np.sqrt(np.mean(self.residuals**2)))
        worst = int(np.abs(self.residuals).argmax())
        lines.append(
            f"{num} point{'' if num == 1 else 's'}, error {rms:.1%} (root mean square), worst "
            f"{self.residuals[worst]:+.1%} at {self.labels[worst]}"
        )
        return lines


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """float64 [columns]: x >= 0 with the least |matrix x - target|, by the active-set method.

    matrix: float64 [rows, columns], target: float64 [rows]. Lawson and Hanson, Solving Least
    Squares Problems, chapter 23.
    """
    num_columns = matrix.shape[1]
    solution = np.zeros(num_columns)
    free = np.zeros(num_columns, dtype=bool)
    scale = np.linalg.norm(matrix, axis=0)
    tolerance = 1e-12 * max(float(np.linalg.norm(target)), 1e-300)
    for _ in range(10 * num_columns + 10):
        gradient = matrix.T @ (target - matrix @ solution)
        useful = ~free & (gradient > tolerance * scale)
        if not useful.any():
            break
        rate = np.where(useful, gradient / np.where(scale > 0, scale, 1.0), -np.inf)
        free[int(rate.argmax())] = True
        while True:
            trial = np.zeros(num_columns)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            low = free & (trial <= 0)
            if not low.any():
                break
            step = float((solution[low] / (solution[low] - trial[low])).min())
            solution = solution + step * (trial - solution)
            free &= solution > 1e-15
            solution[~free] = 0.0
        solution = trial
    return solution


def fit_scales(columns: dict[str, np.ndarray], seconds: np.ndarray, labels: list[str]) -> FitReport:
    """Fits the factors.

    columns: float64 [points] each, analytic seconds of fixed, linear, attention, cp_intra and
    cp_inter, and again_linear .. again_cp_inter, the forward that recomputed layers repeat.
    seconds: float64 [points], measured.
    """
    names = ("fixed", "linear", "attention", "recompute", "cp_intra", "cp_inter")
    weighted = {name: column / seconds for name, column in columns.items()}
    reasons = {
        name: "no point shows it"
        for name in names
        if not _jacobian(weighted, dict.fromkeys(names, 1.0), name).any()
    }
    while True:
        free = [name for name in names if name not in reasons]
        scales = _solve(weighted, free, names)
        errors = _errors(weighted, scales, free)
        relative = {name: errors[name] / max(scales[name], 1.0) for name in free}
        vague = [name for name in free if relative[name] > MAX_RELATIVE_ERROR]
        if not vague:
            break
        # linear goes last: it is the best known of those that move together
        worst = max(vague, key=lambda name: (name != "linear", relative[name]))
        reasons[worst] = "the points do not tell it from the other terms"
    predicted = _predicted(weighted, scales)
    return FitReport(
        residuals=predicted - 1.0,
        labels=tuple(labels),
        terms={
            name: Term(scales[name], errors.get(name, 0.0), name in free, reasons.get(name, ""))
            for name in names
        },
    )


def _again(weighted: dict[str, np.ndarray], scales: dict[str, float]) -> np.ndarray:
    return sum(
        (scales[name] * weighted[f"again_{name}"] for name in _REPEATED),
        start=np.zeros_like(weighted["fixed"]),
    )


_REPEATED = ("linear", "attention", "cp_intra", "cp_inter")


def _jacobian(weighted: dict[str, np.ndarray], scales: dict[str, float], name: str) -> np.ndarray:
    """float64 [points]: how the prediction moves with the factor `name`."""
    if name == "recompute":
        return _again(weighted, scales)
    moves = weighted[name]
    if name in _REPEATED:
        moves = moves + scales["recompute"] * weighted[f"again_{name}"]
    return moves


def _predicted(weighted: dict[str, np.ndarray], scales: dict[str, float]) -> np.ndarray:
    """float64 [points]: predicted / measured."""
    names = ("fixed", *_REPEATED)
    return sum(
        (scales[name] * _jacobian(weighted, scales, name) for name in names),
        start=np.zeros_like(weighted["fixed"]),
    )


def _solve(
    weighted: dict[str, np.ndarray], free: list[str], names: tuple[str, ...]
) -> dict[str, float]:
    """Factors of all terms, those not free at 1: turns of least squares, recompute by itself."""
    scales = dict.fromkeys(names, 1.0)
    direct = [name for name in free if name != "recompute"]
    for _ in range(_ROUNDS):
        before = dict(scales)
        if direct:
            rest = dict(scales) | dict.fromkeys(direct, 0.0)
            matrix = np.stack([_jacobian(weighted, scales, name) for name in direct], axis=1)
            found = nonnegative_least_squares(matrix, 1.0 - _predicted(weighted, rest))
            scales |= dict(zip(direct, found.tolist(), strict=True))
        if "recompute" in free:
            again = _again(weighted, scales)
            missing = 1.0 - _predicted(weighted, scales | {"recompute": 0.0})
            square = float(again @ again)
            scales["recompute"] = max(float(again @ missing) / square, 0.0) if square else 1.0
        if all(abs(scales[name] - before[name]) <= 1e-10 * (1 + before[name]) for name in names):
            break
    return scales


def _errors(
    weighted: dict[str, np.ndarray], scales: dict[str, float], free: list[str]
) -> dict[str, float]:
    """Standard errors of the free factors; infinite where the points do not determine them."""
    if not free:
        return {}
    matrix = np.stack([_jacobian(weighted, scales, name) for name in free], axis=1)
    norms = np.linalg.norm(matrix, axis=0)
    safe = np.where(norms > 0, norms, 1.0)
    num_points = len(matrix)
    residuals = _predicted(weighted, scales) - 1.0
    freedom = num_points - len(free)
    noise = float(residuals @ residuals) / freedom if freedom > 0 else 0.0
    _, values, vectors = np.linalg.svd(matrix / safe, full_matrices=True)
    values = np.concatenate([values, np.zeros(len(free) - len(values))])
    lost = values < 1e-6 * values[0]
    inverse = np.where(lost, 0.0, 1.0 / np.where(lost, 1.0, values) ** 2)
    variance = noise * ((vectors.T**2) @ inverse) / safe**2
    undetermined = ((vectors.T**2) @ lost) > 1e-6
    errors = np.where(undetermined | (norms == 0), np.inf, np.sqrt(variance))
    return dict(zip(free, errors.tolist(), strict=True))
