"""Cost models recovered from points: known factors, terms that points do not tell, the solver."""

from dataclasses import fields, replace

import numpy as np
import pytest

from megatron_hbp.cost_model import CostModel, RunLayout, Scales, analytic, fitted
from megatron_hbp.fit import nonnegative_least_squares
from megatron_hbp.hardware import DEVICES
from megatron_hbp.level import Level
from megatron_hbp.models import MODELS
from megatron_hbp.profile import Point, Profile

LLAMA = analytic(MODELS["llama-3.1-8b"], DEVICES["h100-80gb"], RunLayout(num_ranks=32))


def _total(cost: CostModel, level: Level, num_sequences: int) -> float:
    """Seconds of a full pack of equally long sequences."""
    squares = level.pack_len**2 / num_sequences
    one = [np.array([value]) for value in (num_sequences, level.pack_len, squares)]
    return float(cost.pack_seconds(level, *one).total[0])


TRUTHS = [
    Scales(),
    Scales(fixed=1.0, linear=1.5, attention=0.7, recompute=1.2, cp_intra=3.0, cp_inter=1.6),
    Scales(fixed=1.0, linear=0.8, attention=2.0, recompute=1.0, cp_intra=1.0, cp_inter=4.0),
]


def _measured(truth: CostModel, seed: int, *, noise: float, count: int = 40, **choices) -> Profile:
    """`count` different points, by default all combinations of extremes, with relative noise."""
    rng = np.random.default_rng(seed)
    drawn = {
        "budget": (4096, 32768),
        "cp_size": (1, 2, 4, 8, 16),
        "layers": (0, 32),
        "sequences": (1, 64),
    } | choices
    cells = np.stack(np.meshgrid(*drawn.values()), axis=-1).reshape(-1, 4)
    points = []
    for budget, cp_size, layers, num in rng.permutation(cells)[:count].tolist():
        level = Level(budget * cp_size, cp_size, layers)
        seconds = _total(truth, level, num_sequences=num) * (1 + noise * rng.standard_normal())
        squares = level.pack_len**2 / num
        points.append(Point(level, seconds, level.pack_len, squares, num))
    return Profile("llama-3.1-8b", "h100-80gb", truth.layout, tuple(points))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("truth", TRUTHS)
def test_the_fit_recovers_a_known_model_from_40_noisy_points(truth, seed):
    known = replace(LLAMA, scales=truth)
    found, report = fitted(_measured(known, seed, noise=0.03))
    for cp_size in (1, 2, 8, 16):
        for budget in (4096, 8192, 32768):
            for layers in (0, 16, 32):
                for num in (1, 20, 400):
                    level = Level(budget * cp_size, cp_size, layers)
                    wanted = _total(known, level, num_sequences=num)
                    got = _total(found, level, num_sequences=num)
                    assert got == pytest.approx(wanted, rel=0.05)
    assert found.scales.linear == pytest.approx(truth.linear, rel=0.05)
    assert found.scales.attention == pytest.approx(truth.attention, rel=0.05)
    for name, term in report.terms.items():
        if term.fitted:
            assert abs(term.scale - getattr(truth, name)) < 4 * term.error, name
    assert report.worst < 0.15


@pytest.mark.parametrize("truth", TRUTHS)
def test_points_without_noise_give_every_factor(truth):
    truth = replace(truth, fixed=2.5)
    _, report = fitted(_measured(replace(LLAMA, scales=truth), 0, noise=0.0))
    assert all(term.fitted for term in report.terms.values())
    assert report.scales == pytest.approx(
        {field.name: getattr(truth, field.name) for field in fields(Scales)}, rel=1e-6
    )
    assert report.worst < 1e-6


def test_terms_that_no_point_shows_stay_analytic_and_are_named():
    known = replace(LLAMA, scales=Scales(linear=1.4, attention=1.3, cp_inter=9.0, recompute=3.0))
    profile = _measured(known, 1, noise=0.01, count=12, cp_size=(1,), layers=(0,))
    profile = replace(profile, points=profile.points[:9])
    found, report = fitted(profile)
    for name in ("cp_intra", "cp_inter", "recompute"):
        assert report.terms[name].scale == 1
        assert report.terms[name].reason == "no point shows it"
    assert found.scales.linear == pytest.approx(1.4, rel=0.03)
    assert any("cp_inter: 1 x analytic (analytic: no point shows it)" in t for t in report.lines())


def test_terms_that_move_together_are_not_told_apart():
    """One token budget, no CP, no recompute: fixed and linear are one column."""
    known = replace(LLAMA, scales=Scales(linear=1.4))
    choices = {"budget": (16384,), "cp_size": (1,), "layers": (0,)}
    profile = _measured(known, 1, noise=0.0, sequences=(1, 2, 4, 8, 16, 32, 64), **choices)
    found, report = fitted(profile)
    assert report.terms["fixed"].reason == "the points do not tell it from the other terms"
    assert found.scales.linear == pytest.approx(1.4, rel=1e-6)
    assert report.terms["linear"].fitted


def test_one_point_is_met_by_one_factor():
    profile = _measured(replace(LLAMA, scales=Scales(linear=2.0)), 3, noise=0.0, count=1)
    found, report = fitted(profile)
    point = profile.points[0]
    got = _total(found, point.level, num_sequences=point.sequences)
    assert got == pytest.approx(point.seconds)
    assert [name for name, term in report.terms.items() if term.fitted] == ["linear"]
    lines = report.lines()
    assert "error unknown: no more points than factors" in lines[1]
    assert lines[-1].startswith("1 point, ")


def test_a_profile_without_squares_cannot_be_fitted():
    points = (Point(Level(16384, 1, 28), 2.65), Point(Level(131072, 8, 28), 3.05))
    profile = Profile("llama-3.1-8b", "h100-80gb", LLAMA.layout, points)
    with pytest.raises(ValueError, match="no point with tokens and squares"):
        fitted(profile)
    with pytest.raises(ValueError, match="model 'llama-9' is neither"):
        fitted(replace(profile, model="llama-9"))


def test_nonnegative_least_squares_by_hand_and_by_its_conditions():
    matrix = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert nonnegative_least_squares(matrix, np.array([2.0, -1.0, 5.0])).tolist() == [2.0, 0.0]
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows, columns = rng.integers(1, 9, size=2)
        matrix, target = rng.standard_normal((rows, columns)), rng.standard_normal(rows)
        if rng.random() < 0.3:
            matrix[:, 0] = matrix[:, -1]
        found = nonnegative_least_squares(matrix, target)
        gradient = matrix.T @ (matrix @ found - target)
        # Karush, Kuhn, Tucker: no step down is allowed, and none is left where x is above 0
        assert (found >= 0).all()
        assert (gradient > -1e-8).all()
        assert np.abs(gradient[found > 0]).max(initial=0) < 1e-8
