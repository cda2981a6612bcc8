"""The projections and norms of multi-latent attention, with and without compressed queries."""

from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_hbp.host.attention import positioned_mla
from megatron_hbp.host.mla_norms import norms_of


def _config(q_lora_rank: int | None, *, qk_layernorm: bool = True) -> MLATransformerConfig:
    return MLATransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        q_lora_rank=q_lora_rank,  # type: ignore[arg-type]  # None is the host's own way
        kv_lora_rank=16,
        qk_layernorm=qk_layernorm,
        normalization="RMSNorm",
        transformer_impl="local",
    )


def _submodules(*, qk_layernorm: bool = True) -> Any:
    layer: Any = get_gpt_layer_local_submodules(
        multi_latent_attention=True, qk_layernorm=qk_layernorm, normalization="RMSNorm"
    )
    return layer.self_attention.submodules


def test_queries_that_are_not_compressed_have_no_norm():
    submodules = _submodules()
    found = norms_of(_config(None), submodules)
    assert found["linear_q_proj"] is ColumnParallelLinear
    assert found["q_layernorm"] is IdentityOp
    assert found["linear_q_up_proj"] is IdentityOp
    assert found["kv_layernorm"] is submodules.kv_layernorm is not IdentityOp
    assert found["linear_kv_up_proj"] is ColumnParallelLinear


@pytest.mark.parametrize(("rank", "norm"), [(32, True), (32, False), (None, False)])
def test_everything_else_is_the_hosts(rank, norm):
    config, submodules = _config(rank, qk_layernorm=norm), _submodules(qk_layernorm=norm)
    assert norms_of(config, submodules) == QKNormConfigResolver(config, submodules).resolve()


def test_the_config_keeps_its_rank():
    config = _config(None)
    norms_of(config, _submodules())
    assert config.q_lora_rank is None


def test_the_host_alone_cannot_build_it():
    # when this fails the host has learnt it: mla_norms.py can go
    with pytest.raises(ValueError, match="will not be used"):
        QKNormConfigResolver(_config(None), _submodules()).resolve()


def test_the_attention_asks_for_these_norms():
    ours = positioned_mla(MLASelfAttention)
    assert "_resolve_qk_norm_config" in vars(ours)
    assert "_resolve_qk_norm_config" in vars(MLASelfAttention)  # the door is still there
