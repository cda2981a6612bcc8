"""The search over other settings, and the front."""

import numpy as np
import pytest

from megatron_hbp import Level, build_plan
from megatron_hbp.report import pareto
from megatron_hbp.report.page_front import front_figure, front_rows
from megatron_hbp.report.pareto import GOALS, on_front, search

LEVELS = (Level(128, 1, 2), Level(512, 4, "full"))


def _plan(num_stages=1, **settings):
    rng = np.random.default_rng(1)
    lens = np.concatenate([rng.integers(2, 128, 600), rng.integers(129, 512, 40)])
    return build_plan(lens, LEVELS, 8, 2, num_stages, **settings)


def _silent(text):
    assert text


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"packer": "isf", "mixing": "step"},
        {"num_stages": 2, "max_mixing": 4.0},
        {"num_stages": 2, "mixing": "microbatch"},
        {"curriculum_steps": 3},
    ],
)
def test_the_plan_is_the_first_point_with_its_own_metrics(settings):
    plan = _plan(**settings)
    found = search(plan, _silent)
    own = [point for point in found.points if point.own]
    assert own == found.points[:1]
    metrics = plan.metrics()
    assert own[0].values == {name: metrics[name] for name, _, _ in GOALS}
    assert found.sequences == found.of == 640


def test_points_differ_and_settings_keep_the_tokens_of_a_step():
    plan = _plan()
    points = search(plan, _silent).points
    values = [tuple(point.values.values()) for point in points]
    assert len(set(values)) == len(values) > 20
    for point in points:
        setting = point.setting
        budget = setting.levels[0].tokens_per_rank
        assert budget * setting.num_microbatches == plan.token_budget * plan.num_microbatches
        assert setting.levels[-1].pack_len == plan.levels[-1].pack_len
    assert len({point.setting.packer for point in points}) == 5
    assert {len(point.setting.levels) for point in points} == {1, 2, 3, 4}


def test_the_front_is_what_no_other_point_beats():
    points = search(_plan(2), _silent).points
    signs = [-1 if more else 1 for _, _, more in GOALS]

    def beats(one, other):
        pairs = [
            (sign * a, sign * b)
            for sign, a, b in zip(signs, one.values.values(), other.values.values(), strict=True)
        ]
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    assert [p.front for p in points] == [not any(beats(q, p) for q in points) for p in points]
    assert 0 < sum(p.front for p in points) < len(points)


def test_on_front():
    table = np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [3.0, 1.0], [1.0, 3.0]])
    assert on_front(table).tolist() == [True, True, False, True, True]


def test_more_sequences_than_the_sample_are_a_sample_of_the_plans_own(monkeypatch):
    monkeypatch.setattr(pareto, "SAMPLE", 200)
    plan = _plan()
    found = search(plan, _silent)
    assert (found.sequences, found.of) == (200, 640)
    assert found.points == search(plan, _silent).points


def test_settings_that_cannot_be_are_counted(monkeypatch):
    monkeypatch.setattr(pareto, "_MIXING_BOUNDS", (0.0, 0.001))
    found = search(_plan(2), _silent)
    steps = {levels: num for levels, num in pareto._level_choices(_plan(2)) if num > 1}
    assert found.failed == 5 * len(steps) > 0, "5 packers; a step of one micro-batch has no choice"
    assert all(point.setting.max_mixing == 0 for point in found.points)


def test_cp_sizes_divide_the_ranks():
    plan = build_plan(np.array([5, 300, 380, 7] * 20), (Level(384, 3),), 3, 2)
    found = search(plan, _silent)
    assert found.points[0].own
    assert {level.cp_size for p in found.points for level in p.setting.levels} == {1, 3}


def test_the_figure_has_every_point_and_an_axis_for_every_goal():
    found = search(_plan(), _silent)
    figure, goals = front_figure(found)
    assert len(figure.marks) == len(found.points)
    assert [mark.kind for mark in figure.marks].count("own") == 1
    assert figure.marks[-1].kind == "own", "it lies above the others"
    for name, _, _ in GOALS:
        at = goals[name]["at"]
        assert len(at) == len(found.points)
        assert 0 <= min(at) <= max(at) <= 100
    rows = front_rows(found)
    assert rows[0].own
    assert all(row.front for row in rows[1:])
    assert sum(row.front for row in rows) == sum(point.front for point in found.points)
