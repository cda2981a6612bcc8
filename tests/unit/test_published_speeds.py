"""Predicted shares of the peak beside published ones: the table of docs/profile.md is computed."""

import re
from pathlib import Path

import numpy as np
import pytest

from megatron_hbp.cost_model import RunLayout, analytic
from megatron_hbp.hardware import DEVICES
from megatron_hbp.level import Level
from megatron_hbp.model_shape import ModelShape
from megatron_hbp.models import MODELS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "profile.md"


def _gpt(layers: int, hidden: int, heads: int, vocab: int) -> ModelShape:
    return ModelShape(
        name="gpt",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        tied_embeddings=True,
        gated_mlp=False,
    )


GPT_175B = _gpt(96, 12288, 96, 131072)  # vocabulary of Megatron-LM's README
GPT_530B = _gpt(105, 20480, 128, 51200)
LLAMA_405B = ModelShape(
    name="llama-3.1-405b",
    num_layers=126,
    hidden_size=16384,
    ffn_hidden_size=53248,
    num_attention_heads=128,
    num_query_groups=8,
    head_dim=128,
    vocab_size=128256,
)
MIXTRAL = ModelShape(
    name="mixtral-8x7b",
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    head_dim=128,
    vocab_size=32000,
    num_experts=8,
    moe_topk=2,
    moe_ffn_hidden_size=14336,
)
# model, device, tokens of a micro-batch, its sequences, layout, how far off the prediction may be
RUNS = {
    "GPT-3 175B, 96 H100": (
        *(GPT_175B, "h100-80gb", 4096, 1),
        RunLayout(num_ranks=1, tp_size=8, num_stages=12, num_microbatches=1152),
        0.1,
    ),
    "GPT-3 175B, 4608 H100": (
        *(GPT_175B, "h100-80gb", 4096, 1),
        RunLayout(
            num_ranks=48, tp_size=8, num_stages=12, num_virtual_stages=8, num_microbatches=24
        ),
        0.1,
    ),
    "Llama 3 405B, 8192 H100": (
        *(LLAMA_405B, "h100-80gb", 8192, 1),
        RunLayout(
            num_ranks=64, tp_size=8, num_stages=16, num_virtual_stages=7, num_microbatches=32
        ),
        0.1,
    ),
    "GPT 530B, 2240 A100": (
        *(GPT_530B, "a100-80gb", 2048, 1),
        RunLayout(
            num_ranks=8, tp_size=8, num_stages=35, num_virtual_stages=3, num_microbatches=280
        ),
        0.1,
    ),
    "Mixtral 8x7B, 64 H100": (
        *(MIXTRAL, "h100-80gb", 4096, 1),
        RunLayout(num_ranks=16, num_stages=4, num_virtual_stages=8, ep_size=8, num_microbatches=16),
        0.2,
    ),
    "Qwen3-30B-A3B, 8 H100": (
        *(MODELS["qwen3-30b-a3b"], "h100-80gb", 16384, 4),
        RunLayout(num_ranks=8, ep_size=8, num_microbatches=16),
        0.2,
    ),
    "DeepSeek-V3, 1024 H100": (
        *(MODELS["deepseek-v3"], "h100-80gb", 4096, 1),
        RunLayout(
            num_ranks=256, num_stages=4, num_virtual_stages=8, ep_size=64, num_microbatches=32
        ),
        0.2,
    ),
    "DeepSeek-V3, 256 H100": (
        *(MODELS["deepseek-v3"], "h100-80gb", 4096, 1),
        RunLayout(num_ranks=64, num_stages=4, num_virtual_stages=8, ep_size=64, num_microbatches=8),
        0.2,
    ),
    "Llama 3.1 8B, 8 H100": (
        *(MODELS["llama-3.1-8b"], "h100-80gb", 8192, 1),
        RunLayout(num_ranks=8),
        0.5,
    ),
    "DeepSeek-V3, 256 B200": (
        *(MODELS["deepseek-v3"], "b200-192gb", 4096, 1),
        RunLayout(num_ranks=32, num_stages=8, ep_size=32, num_microbatches=64),
        1.0,
    ),
}


def _share_of_peak(
    model: ModelShape, device: str, tokens: int, num_sequences: int, layout: RunLayout
) -> float:
    """Model FLOPs of a step (forward and backward, causal) over its seconds and all GPUs' peak."""
    cost = analytic(model, DEVICES[device], layout)
    squares = tokens**2 / num_sequences
    one = [np.array([value]) for value in (num_sequences, tokens, squares)]
    seconds = cost.pack_seconds(Level(tokens, 1), *one).total[0]
    step = cost.step_seconds(np.full((layout.num_microbatches, layout.num_ranks), seconds))
    flops = model.matmul_flops_per_token() * tokens + model.attention_flops_per_square() * squares
    flops *= 3 * layout.num_microbatches * layout.num_ranks
    return flops / step.total / layout.world_size / DEVICES[device].peak_flops


def _table() -> dict[str, tuple[str, float]]:
    """Of each run, the predicted and the published share in the documentation."""
    rows = re.findall(
        r"^\| ([^|(]+) \(.*\) \|.*\| (0\.\d+) \| (0\.\d+) \|$",
        DOCS.read_text("utf-8"),
        re.MULTILINE,
    )
    return {run: (predicted, float(published)) for run, predicted, published in rows}


def test_every_run_is_in_the_table():
    assert set(_table()) == set(RUNS)


@pytest.mark.parametrize("run", RUNS)
def test_the_table_is_computed_and_meets_what_is_published(run):
    *setting, tolerance = RUNS[run]
    predicted, published = _table()[run]
    found = _share_of_peak(*setting)
    assert f"{found:.3f}" == predicted
    assert found == pytest.approx(published, rel=tolerance)
