"""Facts of a small run, as the child of `hbp check` would tell them."""

from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp.check.facts import Facts, StageFacts
from megatron_hbp.check.rank_layout import GROUP_KINDS, RankLayout
from megatron_hbp.hardware import DEVICES
from megatron_hbp.level import Level
from megatron_hbp.planner import build_plan
from megatron_hbp.recipe import Recipe

DEVICE = DEVICES["h100-80gb"]
# 4 layers of 64 elements, GQA, dense, on 16 GPUs: TP 2, PP 2
WORDS = """--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --vocab-size 256 --swiglu
--untie-embeddings-and-output-weights""".split()
_LAYER = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
_NORMS = 2 * 64
LEVELS = (Level(64, 1), Level(128, 2))


def recipe(**changes: Any) -> Recipe:
    known: dict[str, Any] = {"gpus": 16, "device": "h100-80gb", "title": "A small run"}
    return Recipe(name="small", path=Path("small.toml"), flags={}, **known | changes)


def facts(folder: Path, *, num_microbatches: int = 4, **changes: Any) -> Facts:
    """A good run's, its plan in `folder`."""
    lengths = np.array([3 + (11 * i) % 100 for i in range(300)], dtype=np.int32)
    plan = build_plan(lengths, LEVELS, 4, num_microbatches, num_stages=2, epochs=2)
    plan.save(folder / "plan")
    ranks = RankLayout(world_size=16, tp_size=2, num_stages=2, expert_tp_size=2)
    stages = [
        StageFacts(
            chunk_dense_layers=(2,),
            chunk_moe_layers=(0,),
            dense_parameters=_LAYER + 2 * _NORMS + extra // 2 + norm,
            expert_parameters=0,
            unique_dense=2 * _LAYER + 2 * _NORMS + extra + norm,
            unique_experts=0,
        )
        for extra, norm in ((256 * 64, 0), (256 * 64, 64))
    ]
    known: dict[str, Any] = {
        "arguments": {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": None,
            "data_parallel_size": 4,
            "global_batch_size": 4 * num_microbatches,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "use_tp_pp_dp_mapping": False,
            "overlap_p2p_comm": True,
            "microbatch_group_size_per_vp_stage": 2,
            "transformer_impl": "transformer_engine",
            "padded_vocab_size": 256,
            "hidden_size": 64,
            "num_experts": None,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_shared_expert_intermediate_size": None,
            "moe_token_dispatcher_type": "alltoall",
            "multi_latent_attention": False,
            "q_lora_rank": None,
            "recompute_granularity": None,
            "recompute_method": None,
            "recompute_num_layers": None,
            "moe_layer_freq": 1,
            "bf16": True,
            "optimizer": "adam",
            "hbp_level": [str(level) for level in LEVELS],
            "train_iters": plan.num_steps,
            "lr": 1e-5,
            "min_lr": 1e-6,
            "lr_decay_style": "cosine",
            "lr_decay_iters": None,
            "lr_warmup_iters": 0,
            "lr_warmup_fraction": 0.25,
            "save": "checkpoints",
            "save_interval": 2,
        },
        "stages": stages,
        "groups": {kind: np.asarray(ranks.members(kind)).tolist() for kind in GROUP_KINDS},
        "plan": str(folder / "plan"),
        "plan_from": "lengths",
    }
    return Facts(**known | changes)
