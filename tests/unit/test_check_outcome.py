"""What `hbp check` concludes: problems, warnings and figures from the facts of a start."""

import dataclasses

import numpy as np
import pytest

from megatron_hbp.check.outcome import conclude
from megatron_hbp.cost_model import analytic
from megatron_hbp.hardware import DEVICES
from megatron_hbp.plan import Plan
from megatron_hbp.simulate import simulate
from tests.unit.check_samples import DEVICE, LEVELS, WORDS, facts, recipe


def conclusion(given, words=WORDS, device=DEVICE, **changes):
    return conclude(recipe(**changes), device, words, given)


def test_a_good_run_fits(tmp_path):
    found = conclusion(facts(tmp_path))
    assert (found.problems, found.warnings, found.notes) == ([], [], [])
    assert found.fits
    assert found.lockstep is not None
    assert found.lockstep.digest


def test_parameters_are_those_of_all_stages_once(tmp_path):
    given = facts(tmp_path)
    found = conclusion(given)
    assert found.parameters == sum(stage.unique_dense for stage in given.stages)
    assert found.active_parameters == found.parameters
    assert found.model is not None
    assert found.parameters == found.model.parameters()


def test_active_parameters_hold_the_routed_experts_of_a_token(tmp_path):
    given = facts(tmp_path)
    given.arguments |= {"num_experts": 8}
    given.stages = [dataclasses.replace(stage, unique_experts=800) for stage in given.stages]
    found = conclusion(given)
    dense = sum(stage.unique_dense for stage in given.stages)
    assert found.parameters == dense + 1600
    assert found.active_parameters == dense + 400


def test_published_counts_that_the_model_does_not_have(tmp_path):
    given = facts(tmp_path)
    counted = sum(stage.unique_dense for stage in given.stages)
    near = conclusion(given, parameters=counted * 1.004, active_parameters=counted * 0.996)
    assert near.problems == []
    without_embedding = counted - 256 * 64
    assert conclusion(given, active_parameters=without_embedding * 1.02).problems == []
    wrong = conclusion(given, active_parameters=without_embedding * 0.97)
    assert "B active parameters, published are" in wrong.problems[0]
    far = conclusion(given, parameters=counted * 1.006, source="https://example.org")
    (problem,) = far.problems
    assert "B parameters, published are" in problem
    assert "https://example.org" in problem


def test_problems_of_the_start_are_kept(tmp_path):
    found = conclusion(facts(tmp_path, problems=["one", "two"], arguments={}, stages=[]))
    assert found.problems == ["one", "two"]
    assert not found.fits
    assert found.parameters is None


def test_memory_that_does_not_fit_is_a_problem_with_a_way_out(tmp_path):
    small = dataclasses.replace(DEVICE, memory_bytes=3 * 2**30)
    found = conclusion(facts(tmp_path), device=small)
    assert found.problems
    assert all(problem.startswith("level ") for problem in found.problems)
    assert found.timeline is None


def test_cp_groups_that_cross_nodes_are_a_warning(tmp_path):
    inside = conclusion(facts(tmp_path))
    crossing = conclusion(facts(tmp_path), gpus_per_node=2)
    assert inside.warnings == []
    assert crossing.fits
    assert any("CP groups of size 2 span 2 nodes" in warning for warning in crossing.warnings)


def test_fewer_micro_batches_than_stages_are_a_warning(tmp_path):
    given = facts(tmp_path, num_microbatches=1)
    assert any("use --global-batch-size 8 or more" in one for one in conclusion(given).warnings)


def test_an_order_of_work_that_is_not_followed_is_said(tmp_path):
    given = facts(tmp_path)
    given.arguments["microbatch_group_size_per_vp_stage"] = 4
    assert any("--microbatch-group-size-per-virtual" in note for note in conclusion(given).notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recompute_granularity": "selective"}, "no --recompute-granularity selective, which"),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
            },
            "no --recompute-method uniform with 2 layers at once",
        ),
        ({"num_experts": 8, "moe_layer_freq": 2}, "no --moe-layer-freq with dense layers behind"),
        ({"num_experts": 8, "moe_layer_freq": [0, 1, 0]}, "no --moe-layer-freq with dense layers"),
        ({"num_experts": 8, "moe_layer_freq": [0, 1, 1]}, None),
        ({"moe_layer_freq": 2}, None),
    ],
)
def test_collectives_that_are_not_followed_are_said(tmp_path, changes, message):
    given = facts(tmp_path)
    given.arguments |= changes
    notes = [note for note in conclusion(given).notes if note.startswith("the collectives of")]
    assert len(notes) == (message is not None)
    assert message is None or message in notes[0]


def test_layers_that_flags_recompute_are_counted(tmp_path):
    """--recompute-method block recomputes the first layers of each chunk, uniform all of them."""
    given = facts(tmp_path)
    given.arguments |= {"recompute_granularity": "full", "recompute_method": "block"}
    given.arguments["recompute_num_layers"] = 1
    chunks = [work.chunks[0] for work in conclusion(given).works]
    assert [chunk.recomputed for chunk in chunks] == [(1, 1), (1, 1)]
    given.arguments["recompute_method"] = "uniform"
    chunks = [work.chunks[0] for work in conclusion(given).works]
    assert [chunk.recomputed for chunk in chunks] == [(2, 2), (2, 2)]


def test_a_plan_that_breaks_lockstep_is_a_problem(tmp_path):
    given = facts(tmp_path)
    plan = Plan.load(str(given.plan))
    offsets = np.array(plan.microbatch_offsets)
    offsets[1] += 1
    dataclasses.replace(plan, microbatch_offsets=offsets).save(tmp_path / "broken")
    found = conclusion(dataclasses.replace(given, plan=str(tmp_path / "broken")))
    assert any("micro-batch 0" in problem for problem in found.problems)


def test_another_model_than_the_one_built_is_a_problem(tmp_path):
    words = [*WORDS, "--hidden-size", "128"]
    found = conclusion(facts(tmp_path), words=words)
    assert any("parameters on a GPU as built" in problem for problem in found.problems)


def test_predicted_time_is_that_of_the_simulator(tmp_path):
    found = conclusion(facts(tmp_path))
    assert found.model is not None
    assert found.layout is not None
    assert found.plan is not None
    cost = analytic(found.model, DEVICES["h100-80gb"], found.layout)
    assert found.timeline is not None
    assert found.timeline.gpu_days == simulate(found.plan, cost).gpu_days


def test_checkpoints_of_the_whole_run(tmp_path):
    given = facts(tmp_path)
    found = conclusion(given)
    assert found.checkpoints is not None
    assert found.checkpoints.bytes_each == 14 * sum(s.unique_dense for s in given.stages)
    given.arguments["save"] = None
    assert conclusion(given).checkpoints is None


def test_without_a_plan_memory_is_still_looked_at(tmp_path):
    found = conclusion(facts(tmp_path, plan=None, plan_from=None))
    assert found.fits
    assert {row.level for row in found.memories} == set(LEVELS)
    assert found.lockstep is None


@pytest.mark.parametrize("field", ["tp", "dp"])
def test_groups_of_the_host_that_are_not_the_layouts_are_a_problem(tmp_path, field):
    given = facts(tmp_path)
    given.groups[field] = [[rank] for rank in range(16)]
    assert conclusion(given).problems
