"""Predicted epochs and choices against real plans, simulated."""

import pytest

from megatron_hbp import build_plan
from megatron_hbp.baselines import next_fit
from megatron_hbp.level import Level
from megatron_hbp.select import LEVEL_PRICE, Candidates, best_levels, predict
from megatron_hbp.simulate import simulate
from tests.unit.selection_cases import CASES, H100, every_set, mixture, model


@pytest.mark.parametrize("name", CASES)
def test_the_choice_is_the_best_of_real_plans(name):
    """build_plan() and simulate() on every set of levels of a small grid."""
    lens, cost, budgets = CASES[name]
    layout = cost.layout
    cp_sizes = tuple(cp for cp in (1, 2, 4, 8, 16) if layout.num_ranks % cp == 0)
    found = best_levels(lens, cost, Candidates(token_budgets=budgets, cp_sizes=cp_sizes))
    simulated = {}
    for levels in every_set(lens, cost, budgets, cp_sizes):
        plan = build_plan(
            lens, levels, layout.num_ranks, layout.num_microbatches, layout.num_stages
        )
        simulated[levels] = simulate(plan, cost).total_seconds
        predicted = predict(levels, lens, cost)
        assert predicted.seconds == pytest.approx(simulated[levels], rel=0.03)
        assert abs(predicted.num_steps - plan.num_steps) <= 1
        planned = plan.metrics()["communication_ratio"]
        assert predicted.communication_ratio == pytest.approx(planned, abs=0.03)
    assert len(simulated) > 20
    assert simulated[found.levels] <= 1.02 * min(simulated.values())


@pytest.mark.parametrize("name", CASES)
def test_the_dynamic_program_finds_what_enumeration_finds(name):
    lens, cost, budgets = CASES[name]
    cp_sizes = tuple(cp for cp in (1, 2, 4, 8, 16) if cost.layout.num_ranks % cp == 0)
    found = best_levels(lens, cost, Candidates(token_budgets=budgets, cp_sizes=cp_sizes))

    def charged(levels):
        return predict(levels, lens, cost).seconds * (1 + LEVEL_PRICE * (len(levels) - 1))

    best = min(map(charged, every_set(lens, cost, budgets, cp_sizes)))
    assert charged(found.levels) <= best * (1 + 1e-4)


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (8, 32)])
@pytest.mark.parametrize("texts", [("131072:8",), ("16384:1", "131072:8")])
@pytest.mark.parametrize("short", [1500, 3000, 8000])
def test_few_steps_hold_unlike_micro_batches(short, texts, stages, microbatches):
    """A pipeline waits for the heaviest one, and an epoch of few steps cannot set it apart."""
    lens = mixture(0, short, short // 100, 120000)
    cost = model(H100, num_ranks=8, num_stages=stages, num_microbatches=microbatches)
    levels = [Level.parse(text) for text in texts]
    plan = build_plan(lens, levels, 8, microbatches, stages)
    simulated = simulate(plan, cost).total_seconds
    assert predict(levels, lens, cost).seconds == pytest.approx(simulated, rel=0.06)


@pytest.mark.parametrize("name", ["dense", "experts", "pipeline"])
def test_static_packing_is_as_slow_as_simulated(name):
    lens, cost, _ = CASES[name]
    found = best_levels(lens, cost, Candidates(cp_sizes=(8,)))
    assert found.static is not None
    (level,) = found.static.levels
    assert level.pack_len >= lens.max()
    placement = next_fit(
        lens, level, cost.layout.num_ranks, cost.layout.num_microbatches, order="random"
    )
    simulated = simulate(placement, cost, [level]).total_seconds
    # next-fit leaves space that good packers fill: some more micro-batches
    assert 0.88 * simulated < found.static.seconds < 1.02 * simulated
