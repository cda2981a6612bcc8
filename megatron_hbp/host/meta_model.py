"""Pipeline stages built on the meta device: shapes and counts, no memory, no GPU.

The layers are those of the run with the host's local implementation in place of Transformer
Engine's, which needs a GPU's libraries to be imported: the same parameters under other names.
Fusions, which change no parameter, are off.

Guarantees (asserted by tests/host/test_preflight.py and tests/distributed/
test_preflight_counts.py): counts are those of the real model's named parameters; a copy
(tensor-parallel, or a tied embedding on the last stage) is counted once.
"""

import dataclasses
import functools
from typing import Any

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_hbp.check.facts import StageFacts
from megatron_hbp.host.layer_spec import hbp_layer_spec

# What needs a compiled extension or Transformer Engine when layers are made.
_OFF = (
    "gradient_accumulation_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "apply_rope_fusion",
)


def build_stage(args: Any, model_config: Any, cp_sizes: tuple[int, ...]) -> StageFacts:
    """The stage of the rank that this process is in fake_cluster.as_rank()."""
    config = dataclasses.replace(model_config)
    config.transformer = _local(model_config.transformer)
    config.transformer_layer_spec = functools.partial(hbp_layer_spec, cp_sizes=cp_sizes)
    chunks = _chunks(args, config)
    layers = [chunk.decoder.layers for chunk in chunks]
    moe = tuple(sum(isinstance(layer.mlp, MoELayer) for layer in chunk) for chunk in layers)
    named = [pair for chunk in chunks for pair in chunk.named_parameters()]
    routed = {
        parameter
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, MoELayer)
        for parameter in module.experts.parameters()
    }
    experts = sum(p.numel() for _, p in named if p in routed)
    dense = [(name, p) for name, p in named if p not in routed]
    tp_size = args.tensor_model_parallel_size
    whole = args.transformer_impl == "transformer_engine"
    return StageFacts(
        chunk_dense_layers=tuple(len(c) - m for c, m in zip(layers, moe, strict=True)),
        chunk_moe_layers=moe,
        dense_parameters=sum(
            p.numel() * (tp_size if whole and _is_whole_in_te(name) else 1) for name, p in dense
        ),
        expert_parameters=experts,
        unique_dense=sum(
            p.numel() * (tp_size if getattr(p, "tensor_model_parallel", False) else 1)
            for name, p in dense
            if not _is_copy(name, config)
        ),
        unique_experts=experts
        * args.expert_model_parallel_size
        * (args.expert_tensor_parallel_size or tp_size),
    )


def _chunks(args: Any, config: Any) -> list[Any]:
    """The stage's models, one a virtual stage."""
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    get_cuda_rng_tracker().reset()
    model_parallel_cuda_manual_seed(args.seed)
    virtual = args.virtual_pipeline_model_parallel_size
    if virtual is None:
        return [builder.build_model(groups)]
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return [
        builder.build_model(
            groups,
            pre_process=first and index == 0,
            post_process=last and index == virtual - 1,
            vp_stage=index,
        )
        for index in range(virtual)
    ]


def _is_whole_in_te(name: str) -> bool:
    """Whether Transformer Engine keeps it whole on every TP rank, and the local layers split it.

    The down projections of MLA: parallel_mode "duplicated" in the host's TE layer spec.
    """
    return ".linear_q_down_proj." in name or ".linear_kv_down_proj." in name


def _is_copy(name: str, config: Any) -> bool:
    """Whether it is the last stage's copy of a tied embedding."""
    return (
        name.startswith("output_layer.")
        and config.share_embeddings_and_output_weights
        and not parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    )


def _local(transformer: Any) -> Any:
    """A copy of the host's configuration for the local implementation.

    Its checks have run on the original; they would hold the copy to what only a GPU needs.
    """
    copy = object.__new__(type(transformer))
    copy.__dict__.update(transformer.__dict__)
    copy.transformer_impl, copy.fp8, copy.fp4 = "local", None, None
    copy.cpu_offloading, copy.cpu_offloading_num_layers = False, 0
    for name in _OFF:
        if hasattr(copy, name):
            setattr(copy, name, False)
    if copy.moe_token_dispatcher_type == "flex":
        # no dispatcher has parameters, and flex needs a GPU's libraries
        copy.moe_token_dispatcher_type = "alltoall"
    return copy
