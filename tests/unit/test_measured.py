"""Predicted beside measured: a log that follows the prediction, one that does not, and restarts."""

import json

import numpy as np
import pytest

from megatron_hbp import Level, build_plan
from megatron_hbp.cost_model import analytic
from megatron_hbp.hardware import DEVICES
from megatron_hbp.models import MODELS
from megatron_hbp.report.simulation import comparison_document, comparison_text
from megatron_hbp.run_layout import RunLayout
from megatron_hbp.simulate import simulate

RANKS, MICROBATCHES = 4, 2
LEVELS = (Level(1024, 1), Level(4096, 4))


def _plan(num_stages=1):
    rng = np.random.default_rng(0)
    lens = np.concatenate([rng.integers(2, 1024, 150), rng.integers(1025, 4097, 12)])
    return build_plan(lens, LEVELS, RANKS, MICROBATCHES, num_stages)


def _timeline(plan):
    layout = RunLayout(num_ranks=RANKS, num_microbatches=MICROBATCHES, num_stages=plan.num_stages)
    return simulate(plan, analytic(MODELS["llama-3.1-8b"], DEVICES["h100-80gb"], layout))


def _write(folder, timeline, steps, wall, cpu=None):
    """wall(step, rank), cpu(step, micro-batch of the plan, rank): seconds that are logged."""
    plan = timeline.plan
    name = plan.hash()[:12]
    folder.mkdir(exist_ok=True)
    for rank in range(RANKS):
        lines = [{"plan": name, "start": 0, "rank": rank}]
        for step in steps:
            microbatches = [
                {"level": str(plan.levels[plan.microbatch_level[m]]), "sequences": []}
                | ({} if cpu is None else {"cpu_seconds": cpu(step, m, rank)})
                for m in range(step * MICROBATCHES, (step + 1) * MICROBATCHES)
            ]
            lines.append(
                {"plan": name, "step": step, "rank": rank, "wall_seconds": wall(step, rank)}
                | {"microbatches": microbatches}
            )
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"rank-{rank:05d}.jsonl").write_text(text)
    return folder


@pytest.fixture(params=[1, 2], ids=["one stage", "two stages"])
def timeline(request):
    return _timeline(_plan(request.param))


def test_a_run_three_times_as_slow_as_predicted(timeline, tmp_path):
    busy = timeline.microbatch_seconds
    folder = _write(
        tmp_path / "log",
        timeline,
        range(timeline.num_steps),
        lambda step, rank: 3 * timeline.last_stage[step, rank],
        lambda step, m, rank: 5 * busy[m, rank],
    )
    found = timeline.against_log(folder)
    assert found.steps.tolist() == list(range(timeline.num_steps))
    assert np.allclose(found.measured, 3 * found.predicted)
    assert found.scale == pytest.approx(3)
    assert found.correlation == pytest.approx(1)
    assert np.allclose(found.errors, 0)
    assert found.problems == ()
    if timeline.cost.layout.num_stages == 1:
        assert found.cpu_correlation == pytest.approx(1)
    else:
        assert np.isnan(found.cpu_correlation)
    assert sum(level.num_microbatches for level in found.by_level) == len(busy)
    for level in found.by_level:
        assert level.measured == pytest.approx(3 * level.predicted)
        if timeline.cost.layout.num_stages == 1:
            assert level.measured_cpu == pytest.approx(5 * level.predicted_rank)
        else:
            assert np.isnan(level.measured_cpu)


def test_the_step_that_is_not_as_predicted_is_named(timeline, tmp_path):
    folder = _write(
        tmp_path / "log",
        timeline,
        range(8),
        lambda step, rank: (2 if step == 5 else 1) * timeline.last_stage[step, rank],
    )
    found = timeline.against_log(folder)
    assert found.scale == pytest.approx(1)
    assert found.worst(1).tolist() == [5]
    assert found.errors[5] == pytest.approx(1)
    assert found.correlation < 1
    text = comparison_text(found)
    assert "8 steps logged: measured = 1 x predicted" in text
    assert "+100.0%" in text
    assert max(map(len, text.splitlines())) <= 100
    document = json.loads(json.dumps(comparison_document(found), allow_nan=False))
    assert document["worst_steps"][0] == 5
    assert document["levels"][0]["measured_cpu"] is None


def test_the_slowest_rank_is_what_counts(tmp_path):
    timeline = _timeline(_plan())
    folder = _write(
        tmp_path / "log",
        timeline,
        range(3),
        lambda step, rank: timeline.last_stage[step].max() * (1.5 if rank == 2 else 1),
    )
    assert timeline.against_log(folder).scale == pytest.approx(1.5)


def test_levels_that_steps_do_not_tell_apart_have_no_seconds(tmp_path):
    timeline = _timeline(_plan())
    folder = _write(tmp_path / "log", timeline, range(1), lambda step, rank: 1.0)
    found = timeline.against_log(folder)
    held = np.unique(timeline.plan.microbatch_level[:MICROBATCHES])
    for index, level in enumerate(found.by_level):
        assert np.isnan(level.measured) == (len(held) > 1 or index not in held)
    assert np.isnan(found.correlation)
    assert comparison_document(found)["correlation"] is None


def test_only_steps_that_count_are_compared(tmp_path):
    """A rank that was cut short, and a restart that went back."""
    timeline = _timeline(_plan())
    folder = _write(
        tmp_path / "log", timeline, range(6), lambda step, rank: timeline.last_stage[step, rank]
    )
    file = folder / "rank-00001.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    name = json.loads(lines[0])["plan"]
    file.write_text("".join(lines[:5]))
    assert timeline.against_log(folder).steps.tolist() == [0, 1, 2, 3]
    late = [json.dumps({"plan": name, "start": 2}) + "\n"]
    file.write_text("".join(lines[:2] + late + lines[3:]))
    found = timeline.against_log(folder)
    assert found.steps.tolist() == [0, 2, 3, 4, 5]
    assert "steps 1 to 1 are not logged" in found.problems[0]
    assert found.problems[0] in comparison_text(found)


def test_logs_without_times_or_of_another_plan(tmp_path):
    timeline = _timeline(_plan())
    folder = _write(tmp_path / "log", timeline, range(0), lambda step, rank: 1.0)
    with pytest.raises(ValueError, match="holds no step with the times of all ranks"):
        timeline.against_log(folder)
    other = _timeline(_plan(num_stages=2))
    with pytest.raises(ValueError, match="holds no line of plan"):
        other.against_log(folder)
    with pytest.raises(ValueError, match="holds no rank"):
        timeline.against_log(tmp_path)
