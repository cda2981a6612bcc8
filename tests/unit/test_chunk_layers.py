"""Layers of each pipeline chunk, as a layout gives them: stages, memory, time, recompute."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_hbp.cost_model import analytic
from megatron_hbp.hardware import DEVICES
from megatron_hbp.level import Level
from megatron_hbp.models import MODELS
from megatron_hbp.run_layout import RunLayout, check_layout, stages_of

MODEL, H100 = MODELS["deepseek-v2"], DEVICES["h100-80gb"]
EVEN = RunLayout(num_ranks=32, num_stages=8, ep_size=32, num_microbatches=16)


def _seconds(cost, level):
    pack = (np.array([1]), np.array([level.pack_len]), np.array([level.pack_len**2]))
    return float(cost.pack_seconds(level, *pack).total[0])


def test_layers_of_each_chunk():
    """As given; recomputed layers are the host's, ceil(layers / chunks) of each chunk."""
    layout = replace(EVEN, chunk_layers=(6, 8, 8, 8, 8, 8, 10, 4))
    assert not check_layout(MODEL, layout)
    stages = stages_of(MODEL, layout)
    assert [stage.num_layers for stage in stages] == [6, 8, 8, 8, 8, 8, 10, 4]
    assert [stage.dense_layers for stage in stages] == [1] + [0] * 7
    assert [stage.recomputed(20, 8) for stage in stages] == [3] * 8
    assert [stage.recomputed(60, 8) for stage in stages] == [6, 8, 8, 8, 8, 8, 8, 4]
    assert [stage.recomputed("full", 8) for stage in stages] == [6, 8, 8, 8, 8, 8, 10, 4]
    twice = replace(layout, num_stages=4, num_virtual_stages=2)
    assert [stage.chunk_layers for stage in stages_of(MODEL, twice)] == [
        (6, 8),
        (8, 8),
        (8, 10),
        (8, 4),
    ]


def test_a_chunk_with_more_layers_makes_a_step_slower_and_fuller():
    even = analytic(MODEL, H100, EVEN)
    uneven = analytic(
        MODEL,
        H100,
        replace(EVEN, chunk_layers=(7, 7, 7, 7, 7, 7, 11, 7)),
    )
    level = Level(4096, 1, "full")
    assert _seconds(uneven, level) > 1.2 * _seconds(even, level)
    assert uneven.stage_memories(level)[6].weights > 1.2 * even.stage_memories(level)[6].weights


def test_a_stage_may_hold_the_output_layer_alone():
    layout = replace(EVEN, chunk_layers=(8, 8, 8, 9, 9, 9, 9, 0))
    cost = analytic(MODEL, H100, layout)
    for layers in (0, "full"):
        *others, last = cost.stage_memories(Level(4096, 1, layers))
        assert last.logits > 0
        assert last.activations == 0
        assert all(memory.activations > 0 for memory in others)
        assert last.weights == 2 * MODEL.hidden_size * (MODEL.vocab_size + 1)
    assert _seconds(cost, Level(4096, 1)) > 0


def test_recompute_of_uneven_chunks_goes_up_to_full():
    """Sixty layers, 8 of each chunk, leave 8 of the 16-layer chunk: only `full` reaches those."""
    layout = replace(EVEN, chunk_layers=(7, 7, 7, 7, 7, 7, 16, 2))
    cost = analytic(MODEL, H100, layout)
    needed = [cost.memory(Level(8192, 1, layers)).total for layers in (60, "full")]
    between = replace(H100, memory_bytes=int(sum(needed) / 2))
    assert analytic(MODEL, between, layout).least_recompute(8192, 1) == "full"
    less = replace(H100, memory_bytes=int(needed[1]) - 1)
    assert analytic(MODEL, less, layout).least_recompute(8192, 1) is None


@pytest.mark.parametrize(
    ("chunk_layers", "message"),
    [
        ((8, 8), "chunk_layers has 2 numbers for 8 stages x 1 virtual stages; give 8"),
        ((8,) * 8, "add up to 64, the model has 60 layers; make them agree"),
        ((8, 8, 8, 8, 8, 8, 16, -4), "give whole numbers of 0 or more"),
        ([8] * 8, "give whole numbers of 0 or more"),
    ],
)
def test_layers_of_chunks_that_cannot_be(chunk_layers, message):
    with pytest.raises(ValueError, match=message):
        analytic(
            MODEL,
            H100,
            replace(EVEN, chunk_layers=chunk_layers),
        )
