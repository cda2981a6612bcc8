"""The simulator: conservation for every placement, times by hand, who waits for whom, scale."""

import dataclasses
import tracemalloc

import numpy as np
import pytest

from megatron_hbp import Level, build_plan
from megatron_hbp import simulate as simulate_module
from megatron_hbp.baselines import plan_placement, single_level, unbalanced_levels
from megatron_hbp.cost_model import CostModel, PackSeconds, analytic
from megatron_hbp.hardware import DEVICES
from megatron_hbp.models import MODELS
from megatron_hbp.placement import Placement
from megatron_hbp.planner import plan_batch
from megatron_hbp.rank_work import TERMS, rank_work
from megatron_hbp.report.compare import placements
from megatron_hbp.run_layout import RunLayout
from megatron_hbp.simulate import simulate

LEVELS = (Level(4096, 1, 8), Level(16384, 4, 8))
RANKS = 8


def _lens(count=3000, seed=0):
    rng = np.random.default_rng(seed)
    short = np.clip(rng.lognormal(6, 1, count), 2, 4096).astype(np.int64)
    return np.concatenate([short, rng.integers(4097, 16385, 40)])


def _cost(model="llama-3.1-8b", **layout):
    layout = {"num_ranks": RANKS} | layout
    return analytic(MODELS[model], DEVICES["h100-80gb"], RunLayout(**layout))


def _check(timeline):
    """Of every rank in every step, the parts are the whole, and every wait has a reason."""
    parts = timeline.compute + timeline.communication + timeline.wait + timeline.bubble
    assert np.allclose(parts + timeline.reduction[:, None], timeline.seconds[:, None])
    for name in ("compute", "communication", "wait", "step_wait", "bubble"):
        assert getattr(timeline, name).min() >= 0
    assert np.isclose(sum(timeline.shares().values()), 1)
    waits = timeline.waits()
    assert np.isclose(waits.by_step.sum(), sum(waits.by_cause.values()))
    assert np.isclose(waits.by_rank.sum(), sum(waits.by_cause.values()))
    assert np.isclose(
        waits.charged.sum(), waits.by_cause["neighbour"] + waits.by_cause["reduction"]
    )
    for cause in ("neighbour", "pipeline"):
        by_level = sum(of[cause] for of in waits.by_level.values())
        assert np.isclose(by_level, waits.by_cause[cause])
    work = sum(sum(level.terms.values()) for level in timeline.by_level)
    assert np.isclose(work, timeline.compute.sum() + timeline.communication.sum())
    assert sum(level.tokens for level in timeline.by_level) == timeline.tokens.sum()
    busy = timeline.microbatch_seconds.sum()
    assert np.isclose(busy, work)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-3.1-8b", {"num_microbatches": 1}),
        ("llama-3.1-8b", {"num_microbatches": 4, "tp_size": 2}),
        ("llama-3.1-8b", {"num_microbatches": 4, "num_stages": 4}),
        ("llama-3.1-8b", {"num_microbatches": 4, "num_stages": 2, "num_virtual_stages": 2}),
        ("deepseek-v2-lite", {"num_microbatches": 4, "ep_size": 4}),
        ("deepseek-v2-lite", {"num_microbatches": 4, "ep_size": 2, "num_stages": 2}),
    ],
)
def test_conservation_for_every_method_and_layout(model, layout):
    cost = _cost(model, **layout)
    run = cost.layout
    plan = build_plan(
        _lens(),
        LEVELS,
        RANKS,
        run.num_microbatches,
        run.num_stages,
        num_virtual_stages=run.num_virtual_stages,
        epochs=2,
    )
    names = []
    for name, placement, levels, _ in placements(plan, lambda text: None):
        names.append(name)
        timeline = simulate(plan if name == "HBP" else placement, cost, levels)
        _check(timeline)
        epochs = 2 if name == "HBP" else 1
        assert timeline.tokens.sum() == epochs * plan.seq_lens.sum()
        assert timeline.squares.sum() == epochs * (plan.seq_lens.astype(np.int64) ** 2).sum()
        assert timeline.gpu_days == pytest.approx(
            run.world_size * timeline.seconds.sum() / 86400, rel=1e-12
        )
        assert 0 < timeline.model_flops_utilization < 1
        assert (timeline.bubble > 0).any() == (run.num_stages > 1)
    assert len(names) == 11


def test_a_plan_and_its_placement_are_one():
    plan = build_plan(_lens(), LEVELS, RANKS, 2)
    cost = _cost(num_microbatches=2)
    ours, theirs = simulate(plan, cost), simulate(plan_placement(plan), cost, LEVELS)
    assert np.array_equal(ours.seconds, theirs.seconds)
    assert np.array_equal(ours.wait, theirs.wait)


def test_one_step_of_reinforcement_learning():
    plan = plan_batch(_lens(400), LEVELS, RANKS)
    _check(simulate(plan, _cost(num_microbatches=plan.num_microbatches)))


def test_balance_saves_waiting():
    plan = build_plan(_lens(), LEVELS, RANKS, 1)
    cost = _cost()
    balanced = simulate(plan, cost)
    unbalanced = simulate(unbalanced_levels(plan.seq_lens, LEVELS, RANKS), cost, LEVELS)
    alone = simulate(single_level(plan.seq_lens, LEVELS[1], RANKS), cost, LEVELS[1:])
    assert balanced.wait.sum() < 0.3 * unbalanced.wait.sum()
    assert balanced.gpu_days < unbalanced.gpu_days
    assert balanced.gpu_days < alone.gpu_days


class _Simple(CostModel):
    """A pack takes a second for each squared token / CP, the budget's tokens in MoE, 5 for CP."""

    reduction_seconds = 0.5

    def pack_seconds(self, level, counts, tokens, squares, *, padded=True):
        parts = {name: np.zeros(len(counts)) for name in TERMS}
        parts["attention"] = squares / level.cp_size
        held = np.full(len(counts), level.tokens_per_rank) if padded else tokens / level.cp_size
        parts["moe_communication"] = held.astype(float)
        parts["cp_communication"] += 5.0 * (level.cp_size > 1)
        return PackSeconds(**parts)


def _simple(num_microbatches, model="llama-3.1-8b", **layout):
    cost = _cost(model, num_ranks=2, num_microbatches=num_microbatches, **layout)
    return _Simple(cost.model, cost.device, cost.layout)


def _placement(packs, step_offsets, num_ranks=2, token_budget=10):
    """packs: (tokens of the sequences, CP size, first rank, micro-batch)."""
    lens = [length for pack in packs for length in pack[0]]
    return Placement(
        seq_lens=np.array(lens),
        sequence_ids=np.arange(len(lens)),
        pack_offsets=np.cumsum([0, *(len(pack[0]) for pack in packs)]),
        pack_cp=np.array([pack[1] for pack in packs]),
        pack_first_rank=np.array([pack[2] for pack in packs]),
        pack_microbatch=np.array([pack[3] for pack in packs]),
        step_offsets=np.array(step_offsets),
        num_ranks=num_ranks,
        token_budget=token_budget,
        cp1_pack_len=token_budget,
    )


def test_two_ranks_by_hand():
    """Rank 0: 4 + 10 and 1 + 10; rank 1: 9 + 10 and 16 + 10; then both: 18 / 2 + 10 + 5."""
    packs = [([2], 1, 0, 0), ([3], 1, 1, 0), ([1], 1, 0, 1), ([4], 1, 1, 1), ([3, 3], 2, 0, 2)]
    levels = (Level(10, 1), Level(20, 2))
    timeline = simulate(_placement(packs, [0, 3]), _simple(3), levels)
    # rank 0 is ready for the shared pack at 25, rank 1 at 45: both end at 69
    assert timeline.compute.tolist() == [[4 + 1 + 9, 9 + 16 + 9]]
    assert timeline.communication.tolist() == [[35, 35]]
    assert np.allclose(timeline.wait, [[20, 0]])
    assert np.allclose(timeline.step_wait, 0)
    assert np.allclose(timeline.seconds, [69.5])
    waits = timeline.waits()
    assert waits.by_cause == pytest.approx({"neighbour": 20, "pipeline": 0, "reduction": 0})
    assert waits.by_level["20:2"]["neighbour"] == pytest.approx(20)
    assert np.allclose(waits.charged, [0, 20])
    assert waits.worst_ranks(1).tolist() == [1]
    assert [level.num_microbatches for level in timeline.by_level] == [2, 1]
    assert timeline.by_level[1].terms["cp_communication"] == 10
    assert timeline.gpu_days == pytest.approx(2 * 69.5 / 86400)
    # without the shared pack they meet at the end of the step
    timeline = simulate(_placement(packs[:4], [0, 2]), _simple(2), levels[:1])
    assert np.allclose(timeline.step_wait, [[20, 0]])
    assert timeline.waits().by_cause["reduction"] == pytest.approx(20)
    assert np.allclose(timeline.waits().charged, [0, 20])


def test_what_of_a_micro_batch_is_forward():
    """A third of matrix products, 1 of 3.5 parts of attention, half of communication."""

    class Terms(CostModel):
        def pack_seconds(self, level, counts, tokens, squares, *, padded=True):
            seconds = (3.0, 6.0, 7.0, 100.0, 2.0, 4.0, 8.0)
            return PackSeconds(*(np.full(len(counts), value) for value in seconds))

    cost = _cost(num_ranks=1)
    cost = Terms(cost.model, cost.device, cost.layout)
    work = rank_work(_placement([([2], 1, 0, 0)], [0, 1], 1), cost, (Level(10, 1),))
    assert work.forward == pytest.approx(1 + 2 + 2 + 1 + 2 + 4)
    assert work.compute == pytest.approx(116)
    assert work.communication == pytest.approx(14)


def test_utilization_by_hand():
    """6 FLOPs a parameter and token, and 3 times the forward of attention, over the peak."""
    timeline = simulate(_placement([([3, 5], 1, 0, 0)], [0, 1]), _simple(1), (Level(10, 1),))
    model, device = timeline.cost.model, timeline.cost.device
    flops = 3 * (model.matmul_flops_per_token() * 8 + model.attention_flops_per_square() * 34)
    seconds = 34 + 10 + 0.5
    found = timeline.model_flops_utilization
    assert found == pytest.approx(flops / (2 * seconds * device.peak_flops))
    assert timeline.tokens_per_gpu_second == pytest.approx(8 / (2 * seconds))
    params = model.active_parameters() - model.vocab_size * model.hidden_size
    assert model.matmul_flops_per_token() == pytest.approx(2 * params, rel=1e-3)


def test_experts_make_every_microbatch_a_barrier():
    """4 + 1 beside 1 + 4: equal at the end of the step, three seconds lost in each micro-batch."""
    packs = [([2], 1, 0, 0), ([1], 1, 1, 0), ([1], 1, 0, 1), ([2], 1, 1, 1)]
    placement, levels = _placement(packs, [0, 2]), (Level(10, 1),)
    apart = simulate(placement, _simple(2, "deepseek-v2-lite"), levels)
    assert apart.seconds == pytest.approx([20 + 5 + 0.5])
    assert np.allclose(apart.wait, 0)
    together = simulate(placement, _simple(2, "deepseek-v2-lite", ep_size=2), levels)
    assert together.seconds == pytest.approx([20 + 8 + 0.5])
    assert np.allclose(together.wait, 3)
    assert np.allclose(together.step_wait, 0)
    assert np.allclose(together.waits().charged, [3, 3])
    _check(together)
    # experts that lie inside a rank's tensor parallel GPUs are no reason to wait
    inside = _simple(2, "deepseek-v2-lite", ep_size=2, tp_size=2)
    assert simulate(placement, inside, levels).seconds == pytest.approx([25.5])
    across = _simple(2, "deepseek-v2-lite", ep_size=2, tp_size=2, expert_tp_size=2)
    assert simulate(placement, across, levels).seconds == pytest.approx([28.5])


def test_a_rank_without_a_pack_trains_a_filler_where_levels_are_given():
    placement = _placement([([3], 1, 0, 0)], [0, 1])
    padded = simulate(placement, _simple(1), (Level(10, 1),))
    assert padded.communication.tolist() == [[10, 10]]
    assert padded.by_level[0].filler == 10
    bare = simulate(placement, _simple(1))
    assert bare.communication.tolist() == [[3, 0]]
    assert np.allclose(bare.wait, [[0, 12]])
    assert bare.by_level[0].filler == 0
    # fillers of a plan cost as much
    plan = build_plan(np.array([3]), [Level(10, 1)], 2)
    assert simulate(plan, _simple(1)).by_level[0].filler == 10


def test_packs_of_unlike_cp_sizes_on_one_rank():
    """Both ranks share 4 tokens, then rank 1 has 2 of its own; nothing is padded."""
    timeline = simulate(_placement([([4], 2, 0, 0), ([2], 1, 1, 0)], [0, 1]), _simple(1))
    assert timeline.compute.tolist() == [[8, 12]]
    assert timeline.communication.tolist() == [[7, 9]]
    assert np.allclose(timeline.wait, [[6, 0]])
    assert timeline.by_level[1].tokens == 4


def test_steps_of_unlike_numbers_of_microbatches():
    packs = [([2], 1, 0, 0), ([3], 1, 1, 1), ([1], 1, 0, 2), ([1], 1, 1, 3)]
    timeline = simulate(_placement(packs, [0, 1, 4]), _simple(1))
    assert timeline.seconds == pytest.approx([6.5, 14.5])
    assert timeline.tokens.tolist() == [2, 5]
    assert timeline.squares.tolist() == [4, 11]
    # interleaved stages need whole rounds
    pipelined = _simple(2, num_stages=2, num_virtual_stages=2)
    _check(simulate(_placement(packs, [0, 1, 4]), pipelined))


def test_a_pipeline_of_equal_microbatches_takes_what_the_cost_model_says():
    lens = np.full(64, 4096)
    plan = build_plan(lens, [Level(4096, 1)], 8, 8, 4)
    cost = _cost(num_microbatches=8, num_stages=4)
    timeline = simulate(plan, cost)
    assert plan.num_steps == 1
    assert timeline.seconds[0] == pytest.approx(
        cost.step_seconds(timeline.microbatch_seconds).total, rel=1e-9
    )


def test_steps_run_in_blocks_give_the_same(monkeypatch):
    plan = build_plan(_lens(), LEVELS, RANKS, 4, 2)
    cost = _cost(num_microbatches=4, num_stages=2)
    whole = simulate(plan, cost)
    monkeypatch.setattr(simulate_module, "_PLACES_AT_ONCE", 100)
    parts = simulate(plan, cost)
    for name in ("seconds", "wait", "bubble", "last_stage"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))
    assert np.allclose(whole.charged, parts.charged)


def test_a_million_sequences_in_little_memory():
    """1024 ranks: an array of [packs, ranks] alone would have 380 MB."""
    lens = np.random.default_rng(0).integers(2, 1500, 1_000_000)
    plan = build_plan(lens, [Level(16384, 1), Level(131072, 8)], 1024, 4)
    assert plan.num_packs * 1024 * 8 > 350e6
    cost = _cost(num_ranks=1024, num_microbatches=4)
    tracemalloc.start()
    timeline = simulate(plan, cost)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64e6
    _check(timeline)


def test_wrong_use():
    plan = build_plan(_lens(), LEVELS, RANKS, 2)
    with pytest.raises(ValueError, match="the plan has 2 micro-batches a step, the cost model's"):
        simulate(plan, _cost())
    with pytest.raises(ValueError, match="the plan has 8 ranks, the cost model's layout 16"):
        simulate(plan, _cost(num_ranks=16, num_microbatches=2))
    cost = _cost(num_microbatches=2)
    with pytest.raises(ValueError, match="the plan's are 4096:1:8 16384:4:8; leave them out"):
        simulate(plan, cost, [Level(4096, 1)])
    placement = plan_placement(plan)
    with pytest.raises(ValueError, match=r"the placement is for 8 ranks, .* has 4"):
        simulate(placement, _cost(num_ranks=4))
    with pytest.raises(ValueError, match=r"have CP size 4, no level has; .* each of \[1, 4\]"):
        simulate(placement, cost, [Level(4096, 1)])
    with pytest.raises(ValueError, match="puts 2048 tokens on a rank, the placement 4096"):
        simulate(placement, cost, [Level(2048, 1), Level(8192, 4)])
    with pytest.raises(ValueError, match="only the time line of a plan"):
        simulate(placement, cost, LEVELS).against_log("nowhere")
    narrow = build_plan(_lens(), [Level(4096, 1), Level(20480, 5)], 10)
    with pytest.raises(ValueError, match="CP size 5 does not divide the 32 attention heads"):
        simulate(narrow, _cost(num_ranks=10))


def test_a_slower_network_takes_longer():
    plan = build_plan(_lens(), [Level(4096, 1), Level(16384, 4)], RANKS, 2)
    cost = _cost(num_microbatches=2)
    slow = dataclasses.replace(cost.device, intra_node_bandwidth=1e9)
    slower = simulate(plan, analytic(cost.model, slow, cost.layout))
    fast = simulate(plan, cost)
    assert slower.gpu_days > fast.gpu_days
    assert np.array_equal(slower.compute, fast.compute)
