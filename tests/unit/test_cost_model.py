"""Seconds of micro-batches and steps: by hand, and in monotone sense."""

import ast
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from megatron_hbp.cost_model import (
    CostModel,
    PackSeconds,
    RunLayout,
    analytic,
)
from megatron_hbp.hardware import DEVICES
from megatron_hbp.level import Level
from megatron_hbp.models import MODELS
from megatron_hbp.reduction import REDUCTION_OVERLAP
from megatron_hbp.run_layout import check_layout, members_on_node, stages_of

ROOT = Path(__file__).resolve().parents[2]
H100 = DEVICES["h100-80gb"]
LAYOUTS = {
    "llama-3.1-8b": RunLayout(num_ranks=32),
    "llama-3.1-70b": RunLayout(num_ranks=16, tp_size=4, num_stages=4, num_microbatches=16),
    "deepseek-v2": RunLayout(num_ranks=32, num_stages=8, ep_size=32, num_microbatches=16),
    "qwen3-30b-a3b": RunLayout(
        num_ranks=16, num_stages=2, num_virtual_stages=3, ep_size=16, num_microbatches=8
    ),
}
COSTS = {name: analytic(MODELS[name], H100, layout) for name, layout in LAYOUTS.items()}
LLAMA = COSTS["llama-3.1-8b"]


def _seconds(cost: CostModel, level: Level, squares=None, num_sequences=16) -> PackSeconds:
    if squares is None:
        squares = num_sequences * (level.pack_len / num_sequences) ** 2
    one = [np.array([value]) for value in (num_sequences, level.pack_len, squares)]
    return cost.pack_seconds(level, *one)


def _total(cost, level, **lengths) -> float:
    return float(_seconds(cost, level, **lengths).total[0])


def test_a_micro_batch_of_llama_8b_by_hand():
    found = _seconds(LLAMA, Level(131072, 8, 16), squares=131072**2)
    tokens, squares = 131072 / 8, 131072**2 / 8
    products = MODELS["llama-3.1-8b"].matmul_flops_per_token() * tokens / (989e12 * 0.55)
    logits = 2 * 4096 * 128256 * tokens / (989e12 * 0.55)
    attention = 32 * 32 * 256 * squares / (989e12 * 0.5)
    # q, k, v and output, 7 of 8 parts to GPUs of the node, at 360 GB/s
    exchange = 32 * (2 * 32 + 2 * 8) * 128 * 2 * tokens * 7 / 8 / 360e9
    assert found.linear[0] == pytest.approx(3 * products)
    assert found.attention[0] == pytest.approx(3.5 * attention)
    assert found.cp_communication[0] == pytest.approx(2 * exchange)
    assert found.recompute[0] == pytest.approx((products - logits + attention + exchange) / 2)
    assert found.fixed[0] == pytest.approx(32 * 3e-4)
    assert found.tp_communication[0] == found.moe_communication[0] == 0
    parts = [getattr(found, field.name)[0] for field in fields(found)]
    assert found.total[0] == pytest.approx(sum(parts))


def test_padding_takes_the_time_of_tokens_unless_told_otherwise():
    level = Level(16384, 1)
    half = [np.array([4]), np.array([8192]), np.array([4 * 2048**2])]
    full = _seconds(LLAMA, level)
    assert LLAMA.pack_seconds(level, *half).linear == pytest.approx(full.linear)
    assert LLAMA.pack_seconds(level, *half, padded=False).linear == pytest.approx(full.linear / 2)


def test_tp_and_expert_exchanges_by_hand():
    cost = analytic(MODELS["qwen3-30b-a3b"], H100, RunLayout(num_ranks=16, tp_size=2, ep_size=16))
    found = _seconds(cost, Level(4096, 1))
    # 48 layers, no shared expert: attention only; an all-gather and a reduce-scatter of half
    sent = 48 * 2 * 4096 * 2048 * 2 / 2
    assert found.tp_communication[0] == pytest.approx(2 * 0.5 * sent / 360e9)
    # 8 copies of the 2048 tokens of a GPU, out and back; 8 of 16 GPUs on the node
    copies = 48 * 2 * 8 * 2048 * 2048 * 2
    wanted = 2 * copies * (7 / 16 / 360e9 + 8 / 16 / 40e9)
    assert found.moe_communication[0] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("size", "stride", "near"),
    [(8, 1, 8), (16, 1, 8), (4, 1, 4), (4, 2, 4), (8, 4, 2), (4, 8, 1), (2, 16, 1), (12, 1, 4)],
)
def test_members_on_a_node_of_8(size, stride, near):
    assert members_on_node(size, stride, 8) == near


def test_a_step_by_hand():
    layout = RunLayout(num_ranks=2, num_stages=4, num_virtual_stages=2, num_microbatches=4)
    cost = analytic(MODELS["llama-3.1-8b"], H100, layout)
    times = np.array([[1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [6.0, 1.0]])
    step = cost.step_seconds(times)
    # the slowest rank: 2 + 2 + 2 + 6, mean 3; (4 - 1) / 2 of it to fill, of 6 - 3 to stall
    assert (step.microbatches, step.pipeline_fill, step.stall) == (12, 4.5, 4.5)
    assert step.reduction == cost.reduction_seconds
    assert step.total == 21 + step.reduction


def test_the_reduction_by_hand():
    # 8.03 B gradients in fp32 and weights in bf16, 8 GPUs of a node: 8 InfiniBand ports of 40 GB/s
    sent = MODELS["llama-3.1-8b"].parameters() * 6 * 31 / 32
    assert LLAMA.reduction_seconds == pytest.approx((1 - REDUCTION_OVERLAP) * sent / 320e9)
    single = analytic(MODELS["llama-3.1-8b"], H100, RunLayout(num_ranks=1))
    assert single.reduction_seconds == 0


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("link", ["intra_node_bandwidth", "inter_node_bandwidth"])
def test_a_slower_network_never_makes_communication_cheaper(name, link):
    slow = replace(H100, **{link: getattr(H100, link) / 3})
    cost, slower = COSTS[name], analytic(MODELS[name], slow, LAYOUTS[name])
    for cp_size in (1, 2, 4, 8, 16):
        for layers in (0, "full"):
            level = Level(4096 * cp_size, cp_size, layers)
            fast, found = _seconds(cost, level), _seconds(slower, level)
            assert found.communication[0] >= fast.communication[0]
            assert found.total[0] >= fast.total[0]
            assert found.computation[0] - found.recompute[0] == pytest.approx(
                fast.computation[0] - fast.recompute[0]
            )
    assert slower.reduction_seconds >= cost.reduction_seconds
    across = Level(4096 * 16, 16)
    assert _total(slower, across) > _total(cost, across)


@pytest.mark.parametrize("name", LAYOUTS)
def test_more_recompute_never_takes_less_time(name):
    num_layers = MODELS[name].num_layers
    for cp_size in (1, 16):
        levels = [Level(4096 * cp_size, cp_size, layers) for layers in range(num_layers + 1)]
        times = [_total(COSTS[name], level) for level in levels]
        assert times == sorted(times)
        assert times[-1] > times[0]
        full = Level(4096 * cp_size, cp_size, "full")
        assert _total(COSTS[name], full) == times[-1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_larger_cp_size_never_takes_more_attention_time(name):
    times = [
        _seconds(COSTS[name], Level(65536, cp_size), squares=65536**2).attention[0]
        for cp_size in (1, 2, 4, 8, 16)
    ]
    assert times == pytest.approx([times[0] / cp_size for cp_size in (1, 2, 4, 8, 16)])


def test_communication_grows_when_cp_leaves_the_node():
    times = [
        _seconds(LLAMA, Level(8192 * cp_size, cp_size)).cp_communication[0]
        for cp_size in (1, 2, 4, 8, 16, 32)
    ]
    assert times[0] == 0
    assert times == sorted(times)
    assert times[4] > 3 * times[3]


@pytest.mark.parametrize("name", LAYOUTS)
def test_pack_cost_orders_full_packs_as_pack_seconds(name):
    levels = (Level(16384, 1, 8), Level(131072, 8, 8))
    cost = COSTS[name].pack_cost(levels)
    ours, planners = [], []
    for level in levels:
        for num_sequences in (1, 2, 7, 30, 200):
            squares = np.array([level.pack_len**2 / num_sequences])
            lengths = (np.array([num_sequences]), np.array([level.pack_len]), squares)
            ours.append(_total(COSTS[name], level, num_sequences=num_sequences))
            planners.append(cost.per_rank(*lengths, np.array([level.cp_size]))[0])
    assert np.argsort(ours).tolist() == np.argsort(planners).tolist()
    # and its seconds are the same but for the fixed ones
    fixed = _seconds(COSTS[name], levels[0]).fixed[0]
    assert np.array(planners) + fixed == pytest.approx(np.array(ours), rel=1e-9)


def test_pack_cost_without_levels():
    cost = LLAMA.pack_cost()
    assert cost.linear * 16384 == pytest.approx(_seconds(LLAMA, Level(16384, 1)).linear[0])
    assert cost.communication > 0
    alone = analytic(MODELS["llama-3.1-8b"], H100, RunLayout(num_ranks=1))
    assert alone.pack_cost().communication == 0


def test_the_slowest_stage_counts():
    # 80 layers on 4 stages: the last one has the output layer, too
    cost = COSTS["llama-3.1-70b"]
    model = MODELS["llama-3.1-70b"]
    products = model.matmul_flops_per_token() - model.logit_flops_per_token()
    stage = products / 4 + model.logit_flops_per_token()
    found = _seconds(cost, Level(4096, 1)).linear[0]
    assert found == pytest.approx(3 * 4096 * stage / 4 / (989e12 * 0.55))
    # 60 layers on 16 stages: the last one has three layers and the output layer, which recompute
    # and attention leave behind the first ones with their four layers
    layout = RunLayout(num_ranks=16, num_stages=16, ep_size=8)
    cost = analytic(MODELS["deepseek-v2"], H100, layout)
    fixed = H100.launch_seconds
    assert _seconds(cost, Level(4096, 1)).fixed[0] == pytest.approx(3 * fixed)
    assert _seconds(cost, Level(4096, 1, "full")).fixed[0] == pytest.approx(4 * fixed)
    assert _seconds(cost, Level(32768, 8)).fixed[0] == pytest.approx(4 * fixed)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama-3.1-8b", {"tp_size": 3}, "TP 3 does not divide the 32 attention heads"),
        ("qwen2.5-32b", {"tp_size": 20}, "TP 20 and the 8 key/value heads: neither divides"),
        ("llama-3.1-8b", {"num_stages": 33}, "33 stages x 1 virtual stages for 32 layers"),
        ("llama-3.1-8b", {"ep_size": 2}, "has no experts, but EP is 2"),
        ("deepseek-v2", {"ep_size": 3}, "EP 3 does not divide the 160 experts"),
        ("deepseek-v2", {"ep_size": 5}, "EP 5 x expert TP 1 does not divide the 32 GPUs"),
        ("deepseek-v2", {"tp_size": 2, "sequence_parallel": False}, "need sequence parallelism"),
        ("qwen3-30b-a3b", {"num_microbatches": 7}, "7 micro-batches are no multiple of 2 stages"),
    ],
)
def test_layouts_that_the_model_cannot_run_on(name, changes, message):
    with pytest.raises(ValueError, match=message):
        analytic(MODELS[name], H100, replace(LAYOUTS.get(name, RunLayout(num_ranks=4)), **changes))


def test_counts_below_one_and_lone_virtual_stages_are_refused():
    with pytest.raises(ValueError, match="num_ranks is 0; give a whole number of 1 or more"):
        RunLayout(num_ranks=0)
    with pytest.raises(ValueError, match="virtual stages need num_stages above 1"):
        RunLayout(num_ranks=8, num_virtual_stages=2)
    with pytest.raises(ValueError, match="num_microbatches is 10000000; give at most 1048576"):
        RunLayout(num_ranks=8, num_microbatches=10**7)


@pytest.mark.parametrize(
    ("name", "cp_size", "message"),
    [
        ("llama-3.1-8b", 3, "CP size 3 does not divide the 32 attention heads"),
        ("qwen2.5-32b", 20, "CP size 20 and the 8 key/value heads .* neither divides"),
        ("llama-3.1-70b", 32, "CP size 32 does not divide the 16 attention heads"),
        ("qwen3-30b-a3b", 32, "CP size 32 does not divide the 16 ranks"),
    ],
)
def test_cp_sizes_that_the_heads_or_ranks_do_not_allow(name, cp_size, message):
    layout = LAYOUTS.get(name, RunLayout(num_ranks=40))
    cost = analytic(MODELS[name], H100, layout)
    level = Level(1024 * cp_size, cp_size)
    with pytest.raises(ValueError, match=message):
        _seconds(cost, level)
    with pytest.raises(ValueError, match=message):
        cost.memory(level)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 5, 6, 8, 10, 16, 20, 32, 40])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-32b", "qwen3-30b-a3b", "deepseek-v2"])
def test_the_rule_for_heads_is_the_hosts(name, cp_size):
    """check_heads of host/attention.py, taken from its text: importing it would need Megatron."""
    text = (ROOT / "megatron_hbp" / "host" / "attention.py").read_text(encoding="utf-8")
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    rule = next(node for node in functions if node.name == "check_heads")
    names: dict = {}
    exec(compile(ast.Module([rule], []), "attention.py", "exec"), names)
    model = MODELS[name]
    cost = analytic(model, H100, RunLayout(num_ranks=480))
    answers = []
    for check in (
        lambda: cost.check_cp_size(cp_size),
        lambda: names["check_heads"](model.num_attention_heads, model.num_query_groups, cp_size),
    ):
        try:
            check()
        except ValueError:
            answers.append("refused")
        else:
            answers.append("allowed")
    assert answers[0] == answers[1]


def test_more_tp_than_key_value_heads():
    """Megatron gives every tensor-parallel rank one head then; CP repeats it."""
    cost = analytic(MODELS["qwen3-30b-a3b"], H100, RunLayout(num_ranks=4, tp_size=8, ep_size=8))
    sent = 48 * (4 + 4) * 256 * 2 * 4096 * 3 / 4  # 4 query heads, 4 copies of a key/value head
    # 8 GPUs of a rank fill a node, so every other rank is on another one
    found = _seconds(cost, Level(16384, 4)).cp_communication[0]
    assert found == pytest.approx(2 * sent / 40e9)


def test_uneven_layers_are_noted():
    assert not LLAMA.notes
    notes = check_layout(MODELS["deepseek-v2"], LAYOUTS["deepseek-v2"])
    assert "the first 4 hold one more" in notes[0]
    sizes = [stage.num_layers for stage in stages_of(MODELS["deepseek-v2"], LAYOUTS["deepseek-v2"])]
    assert sizes == [8, 8, 8, 8, 7, 7, 7, 7]
