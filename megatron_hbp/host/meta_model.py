"""Pipeline stages built on the meta device: shapes and counts, no memory, no GPU.

The layers are those of the run with the host's local implementation in place of Transformer
Engine's, which needs a GPU's libraries to be imported: the same parameters under other names.
Fusions, which change no parameter, are off.

Guarantees (asserted by tests/host/test_preflight.py): counts are those of the real model's named
parameters; a copy (tensor-parallel, or a tied embedding on the last stage) is counted once.
"""

import dataclasses
import functools
from typing import Any

import torch
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
    transformer = config.transformer = _local(model_config.transformer)
    config.transformer_layer_spec = functools.partial(hbp_layer_spec, cp_sizes=cp_sizes)
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    virtual = args.virtual_pipeline_model_parallel_size
    get_cuda_rng_tracker().reset()
    model_parallel_cuda_manual_seed(args.seed)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    chunks = []
    for index in range(virtual or 1):
        position: dict[str, Any] = {}
        if virtual is not None:
            position = {
                "pre_process": first and index == 0,
                "post_process": last and index == virtual - 1,
                "vp_stage": index,
            }
        chunks.append(builder.build_model(groups, **position))
    layers = [chunk.decoder.layers for chunk in chunks]
    moe = tuple(sum(isinstance(layer.mlp, MoELayer) for layer in chunk) for chunk in layers)
    named = [pair for chunk in chunks for pair in chunk.named_parameters()]
    experts = [p for _, p in named if not getattr(p, "allreduce", True)]
    dense = [(name, p) for name, p in named if getattr(p, "allreduce", True)]
    tied_copy = last and not first and config.share_embeddings_and_output_weights
    return StageFacts(
        chunk_dense_layers=tuple(len(c) - m for c, m in zip(layers, moe, strict=True)),
        chunk_moe_layers=moe,
        dense_parameters=sum(p.numel() for _, p in dense),
        expert_parameters=sum(p.numel() for p in experts),
        unique_dense=sum(
            p.numel() * (transformer.tensor_model_parallel_size if _is_split(p) else 1)
            for name, p in dense
            if not (tied_copy and name.startswith("output_layer."))
        ),
        unique_experts=sum(p.numel() for p in experts)
        * transformer.expert_model_parallel_size
        * (transformer.expert_tensor_parallel_size or 1),
    )


def _is_split(parameter: torch.nn.Parameter) -> bool:
    return getattr(parameter, "tensor_model_parallel", False)


def _local(transformer: Any) -> Any:
    """A copy of the host's configuration for the local implementation.

    Its checks have run on the original; they would hold the copy to what only a GPU needs.
    """
    copy = object.__new__(type(transformer))
    copy.__dict__.update(transformer.__dict__)
    copy.transformer_impl, copy.fp8, copy.fp4 = "local", None, None
    for name in _OFF:
        if hasattr(copy, name):
            setattr(copy, name, False)
    return copy
