"""Layer specs: the host's own, with our attention, router and norms put in.

Parameter names stay those of the stock model of the same backend.
"""

import dataclasses
import functools
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_hbp.host.attention import (
    UlyssesAttention,
    positioned_mla,
    positioned_self_attention,
)
from megatron_hbp.host.router import PaddedRouter

_NORM_FIELDS = (
    "input_layernorm",
    "pre_mlp_layernorm",
    "q_layernorm",
    "k_layernorm",
    "kv_layernorm",
)


class TorchNorm:
    """torch's norm, marked for the host's gradient reduction under sequence parallelism.

    The host's wrapper refuses sequence parallelism; the mark is all that it needs.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        if config.normalization == "RMSNorm":
            norm: torch.nn.Module = torch.nn.RMSNorm(hidden_size, eps=eps)
        else:
            norm = torch.nn.LayerNorm(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def hbp_layer_spec(
    model_config: Any, vp_stage: int | None = None, *, cp_sizes: tuple[int, ...]
) -> Any:
    """The block spec of this pipeline chunk, for `GPTModelConfig.transformer_layer_spec`.

    cp_sizes: those of the plan's levels; TE needs them when layers are built. Backends other than
    local and transformer_engine are refused by checks.py.
    """
    config = model_config.transformer
    use_te = config.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        config=config,
        use_transformer_engine=use_te,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    core_attention = te_core_attention(cp_sizes) if use_te else UlyssesAttention
    layers = [_with_hbp(spec, core_attention, torch_norms=not use_te) for spec in block.layer_specs]
    norm = block.layer_norm if use_te else TorchNorm
    return dataclasses.replace(block, layer_specs=layers, layer_norm=norm)


def te_core_attention(cp_sizes: tuple[int, ...]) -> ModuleSpec:
    from megatron_hbp.host.te_attention import TEUlyssesAttention

    return ModuleSpec(module=TEUlyssesAttention, params={"cp_sizes": cp_sizes})


def _with_hbp(layer: ModuleSpec, core_attention: Any, *, torch_norms: bool) -> ModuleSpec:
    submodules = layer.submodules
    attention = submodules.self_attention
    attention = dataclasses.replace(
        attention,
        module=_positioned(attention.module),
        submodules=dataclasses.replace(attention.submodules, core_attention=core_attention),
    )
    if torch_norms:
        attention = dataclasses.replace(
            attention, submodules=_with_torch_norms(attention.submodules)
        )
        submodules = _with_torch_norms(submodules)
    submodules = dataclasses.replace(
        submodules, self_attention=attention, mlp=_with_router(submodules.mlp)
    )
    return dataclasses.replace(layer, submodules=submodules)


@functools.cache
def _positioned(module: type) -> type:
    if issubclass(module, MLASelfAttention):
        return positioned_mla(module)
    if issubclass(module, SelfAttention):
        return positioned_self_attention(module)
    raise ValueError(f"attention {module.__name__} is not supported with HBP; use MLA, GQA or MHA")


def _with_torch_norms(submodules: Any) -> Any:
    changes = {
        name: TorchNorm
        for name in _NORM_FIELDS
        if getattr(submodules, name, None) is WrappedTorchNorm
    }
    return dataclasses.replace(submodules, **changes)


def _with_router(mlp: Any) -> Any:
    """Puts our router into an MoE builder (a partial with MoE submodules); others pass through."""
    if not isinstance(mlp, functools.partial):
        return mlp
    moe = mlp.keywords.get("submodules")
    if not hasattr(moe, "router"):
        return mlp
    return functools.partial(
        mlp.func,
        *mlp.args,
        **(mlp.keywords | {"submodules": dataclasses.replace(moe, router=PaddedRouter)}),
    )
