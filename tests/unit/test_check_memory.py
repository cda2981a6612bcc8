"""Memory of each stage and level, and ways out that fit by the same model."""

import re
from dataclasses import replace

import pytest

from megatron_hbp.check.memory import (
    chunk_layers_of,
    memory_problems,
    not_predicted,
    parameter_problems,
    stage_memories,
)
from megatron_hbp.cost_model import analytic
from megatron_hbp.hardware import DEVICES
from megatron_hbp.level import Level
from megatron_hbp.memory_model import stage_parameters
from megatron_hbp.models import MODELS
from megatron_hbp.run_layout import RunLayout, stages_of

H100 = DEVICES["h100-80gb"]
DEEPSEEK = MODELS["deepseek-v2"]
LAYOUT = RunLayout(
    num_ranks=32,
    num_stages=8,
    ep_size=8,
    num_microbatches=16,
    chunk_layers=(8, 8, 8, 8, 8, 8, 8, 4),
)
LLAMA = MODELS["llama-3.1-8b"]
GIB = 2**30


def _device(gib):
    return replace(H100, memory_bytes=int(gib * GIB))


def test_rows_are_the_cost_models():
    levels = [Level(4096, 1, 16), Level(32768, 8, "full")]
    rows = stage_memories(DEEPSEEK, H100, LAYOUT, levels)
    assert [(row.stage, row.level) for row in rows] == [
        (stage, level) for stage in range(8) for level in levels
    ]
    cost = analytic(DEEPSEEK, H100, LAYOUT)
    for level in levels:
        found = tuple(row.memory for row in rows if row.level == level)
        assert found == cost.stage_memories(level)
    assert {row.device_bytes for row in rows} == {H100.memory_bytes}


def test_built_parameters_replace_the_counted_ones():
    level = Level(4096, 1, "full")
    built = [(10**9 * (stage + 1), 10**8) for stage in range(8)]
    for row in stage_memories(DEEPSEEK, H100, LAYOUT, [level], built):
        dense, experts = built[row.stage]
        assert row.memory.weights == 2 * (dense + experts)
        assert row.memory.gradients == 4 * (dense + experts)
        assert row.memory.optimizer == 12 * (dense / 32 + experts / 4)


def test_parameters_that_differ_are_named():
    stages = stages_of(DEEPSEEK, LAYOUT)
    counted = [stage_parameters(DEEPSEEK, LAYOUT, stage) for stage in stages]
    built = [(round(dense * 1.0005), round(experts)) for dense, experts in counted]
    assert parameter_problems(DEEPSEEK, LAYOUT, built) == []
    built[3] = (built[3][0] * 2, built[3][1])
    (sentence,) = parameter_problems(DEEPSEEK, LAYOUT, built)
    assert f"stage 3 has {sum(built[3]):,} parameters on a GPU as built" in sentence


def test_what_fits_is_no_problem():
    assert memory_problems(DEEPSEEK, H100, LAYOUT, [Level(4096, 1, "full")]) == []


def test_more_recompute_is_the_first_way_out():
    level = Level(16384, 1)
    (sentence,) = memory_problems(LLAMA, H100, RunLayout(num_ranks=32), [level])
    match = re.fullmatch(
        r"level 16384:1 needs [\d.]+ GiB on a GPU of stage 0 \(weights [\d.]+, .* other 3.0\), "
        r"h100-80gb has 79.1 GiB; recompute more in that level: --hbp-level (16384:1:\d+)",
        sentence,
    )
    assert match is not None
    better = Level.parse(match[1])
    assert memory_problems(LLAMA, H100, RunLayout(num_ranks=32), [better]) == []
    # and no less of it does
    fewer = replace(better, recompute_layers=int(better.recompute_layers) - 1)
    assert memory_problems(LLAMA, H100, RunLayout(num_ranks=32), [fewer])


def test_only_full_reaches_all_layers_of_uneven_chunks():
    layout = replace(LAYOUT, chunk_layers=(7, 7, 7, 7, 7, 7, 16, 2))
    rows = [
        stage_memories(DEEPSEEK, H100, layout, [Level(8192, 1, layers)]) for layers in (60, "full")
    ]
    most = [max(row.total for row in one) for one in rows]
    assert most[1] < most[0]
    (sentence,) = memory_problems(DEEPSEEK, _device(sum(most) / 2 / GIB), layout, [Level(8192, 1)])
    assert "--hbp-level 8192:1:full" in sentence


def test_fewer_tokens_are_a_way_out():
    layout = RunLayout(num_ranks=32)
    (sentence,) = memory_problems(LLAMA, H100, layout, [Level(65536, 2, 32)])
    match = re.search(
        r"use --seq-length (\d+) \(this level becomes (\d+):2:full, the others S x CP, too\)",
        sentence,
    )
    assert match is not None
    tokens, pack_len = int(match[1]), int(match[2])
    assert pack_len == 2 * tokens < 65536
    assert memory_problems(LLAMA, H100, layout, [Level(pack_len, 2, "full")]) == []


def test_another_layout_is_a_way_out():
    """70B on TP 4 and one stage: 6 bytes a parameter do not fit whatever the tokens."""
    layout = RunLayout(num_ranks=16, tp_size=4)
    (sentence,) = memory_problems(MODELS["llama-3.1-70b"], H100, layout, [Level(4096, 1, "full")])
    assert "--seq-length" not in sentence
    assert "use --pipeline-model-parallel-size 2 (with every layer recomputed)" in sentence
    twice = replace(layout, num_ranks=8, num_stages=2, num_microbatches=2)
    assert memory_problems(MODELS["llama-3.1-70b"], H100, twice, [Level(4096, 1, "full")]) == []


def test_a_distributed_optimizer_is_a_way_out():
    layout = RunLayout(num_ranks=64, distributed_optimizer=False)
    (sentence,) = memory_problems(LLAMA, H100, layout, [Level(8192, 1, "full")])
    assert "use --use-distributed-optimizer (with every layer recomputed)" in sentence


def test_no_way_out_says_so():
    layout = RunLayout(num_ranks=1)
    (sentence,) = memory_problems(MODELS["llama-3.1-70b"], H100, layout, [Level(4096, 1)])
    assert "use more GPUs for a replica" in sentence


@pytest.mark.parametrize(
    ("level", "message"),
    [(Level(4096, 1), "TP 3 does not divide"), (Level(4096 * 3, 3), "CP size 3 does not divide")],
)
def test_layouts_that_cannot_be_are_refused(level, message):
    layout = RunLayout(num_ranks=32, tp_size=3 if level.cp_size == 1 else 1)
    with pytest.raises(ValueError, match=message):
        stage_memories(LLAMA, H100, layout, [level])


def test_chunks_in_the_order_of_the_layers():
    layout = replace(LAYOUT, num_stages=4, num_virtual_stages=2)
    stages = [stage.chunk_layers for stage in stages_of(DEEPSEEK, layout)]
    assert chunk_layers_of(stages) == LAYOUT.chunk_layers


def test_flags_that_the_model_does_not_know_are_named():
    assert not_predicted({"bf16": True, "optimizer": "adam"}) == []
    notes = " ".join(
        not_predicted(
            {
                "use_precision_aware_optimizer": True,
                "recompute_granularity": "selective",
                "optimizer": "sgd",
                "fp8": "hybrid",
            }
        )
    )
    for said in ("--bf16", "--use-precision-aware", "selective", "--optimizer adam", "--fp8-f"):
        assert said in notes
