"""Lists of collectives that no recorded run can show on a CPU, against the host's sources."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_hbp import Level
from megatron_hbp.check.collectives import ModelTraffic, Traffic, stage_work
from megatron_hbp.check.rank_layout import RankLayout
from megatron_hbp.pipeline import Work

# One dense chunk of a middle stage would issue nothing of the embedding's or the logits'.
LAYOUT = RankLayout(world_size=48, tp_size=2, num_stages=3, ep_size=2, expert_tp_size=2)
SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A", "all_reduce": "AR"}


def issued(model, *, forward, moe=1, dense=0, cp_size=1, recompute: Any = 0, layout=LAYOUT):
    level = Level(64 * cp_size, cp_size, recompute)
    work = stage_work([level], num_chunks=3, dense_layers=[dense], moe_layers=[moe])
    found = Traffic(layout, model).of_work(work, Work(1, 0, 0, forward), 0, cp_size)
    return " ".join(f"{one.kind}:{SHORT.get(one.op, one.op)}" for one in found)


def test_experts_split_over_tp():
    """dispatch_postprocess gathers tokens and probabilities over expert TP, combine scatters."""
    model = ModelTraffic()
    assert issued(model, forward=True) == (
        "tp:AG tp:RS tp_ep:AG ep:A2A ep:A2A expert_tp:AG expert_tp:AG expert_tp:RS ep:A2A"
    )
    assert issued(model, forward=False) == (
        "ep:A2A expert_tp:AG expert_tp:RS expert_tp:RS ep:A2A ep:A2A tp:AG tp:AG tp:RS"
    )


def test_the_flex_dispatcher_has_one_exchange_each_way():
    model = ModelTraffic(dispatcher="flex")
    assert issued(model, forward=True) == "tp:AG tp:RS tp_ep:dispatch tp_ep:combine"
    assert issued(model, forward=False).startswith("tp_ep:combine tp_ep:dispatch tp:AG")


def test_latents_of_transformer_engine_stay_on_their_rank():
    """Down projections are `duplicated`: only the rotary key is gathered, then both ups."""
    model = ModelTraffic(transformer_engine=True, latent_attention=True, q_lora=True)
    assert issued(model, forward=True, moe=0, dense=1) == "tp:AG tp:AG tp:AG tp:RS tp:AG tp:RS"
    assert issued(model, forward=False, moe=0, dense=1) == (
        "tp:AG tp:AG tp:RS tp:AG tp:AG tp:RS tp:AG tp:RS tp:RS"
    )
    plain = replace(LAYOUT, sequence_parallel=False)
    assert issued(model, forward=True, moe=0, dense=1, layout=plain) == "tp:AR tp:AR"


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("transformer_engine", [False, True])
def test_recompute_does_the_forward_again(cp_size, dispatcher, latent, transformer_engine):
    """Without an auxiliary loss, which is taken only where a gradient will be."""
    model = ModelTraffic(
        dispatcher=dispatcher, latent_attention=latent, transformer_engine=transformer_engine
    )
    forward = issued(model, forward=True, cp_size=cp_size)
    backward = issued(model, forward=False, cp_size=cp_size)
    again = issued(model, forward=False, cp_size=cp_size, recompute="full")
    assert again == f"{forward} {backward}"
    assert issued(model, forward=True, cp_size=cp_size, recompute="full") == forward


def test_the_auxiliary_loss_of_a_recomputed_layer_comes_with_its_second_forward():
    model = ModelTraffic(aux_loss=True)
    assert "tp:AR" in issued(model, forward=True)
    assert "tp:AR" not in issued(model, forward=True, recompute="full")
    assert issued(model, forward=False, recompute="full").count("tp:AR") == 1


@pytest.mark.parametrize(
    ("recompute", "by_flags", "wanted"),
    [
        (0, 0, [0, 0]),
        (0, "full", [4, 3]),
        (0, 2, [2, 2]),
        (0, 4, [4, 3]),
        ("full", 0, [4, 3]),
        (5, 0, [3, 3]),
    ],
)
def test_recomputed_layers_are_spread_over_chunks(recompute, by_flags, wanted):
    """5 of 2 chunks: 3 in each, as `block` counts."""
    work = stage_work(
        [Level(64, 1, recompute)],
        num_chunks=2,
        dense_layers=[1, 0],
        moe_layers=[3, 3],
        by_flags=by_flags,
    )
    assert [chunk.recomputed[0] for chunk in work.chunks] == wanted
