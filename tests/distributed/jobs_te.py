"""A stand-in for the host's TE attention, and a training job that uses it on CPU."""

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_pg_size

from megatron_hbp.host import layer_spec, te_attention
from megatron_hbp.host.attention import DocumentAttention


class StandInTE(torch.nn.Module):
    """Takes what TEDotProductAttention takes, asserts what TE asserts, answers in TE's shape.

    Its extra state is a tensor, saved and loaded as TE's is.
    """

    def __init__(  # noqa: PLR0917 - the host's signature
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        assert config.context_parallel_size == 1
        assert attn_mask_type == AttnMaskType.causal
        assert attention_type == "self"
        tp_size = get_pg_size(pg_collection.tp)
        assert config.num_attention_heads % config.num_query_groups == 0
        self.num_heads = config.num_attention_heads // tp_size
        self.num_groups = config.num_query_groups // tp_size
        given = k_channels is not None and v_channels is not None
        self.channels = (k_channels, v_channels) if given else (config.kv_channels,) * 2
        self.documents = DocumentAttention(softmax_scale)
        self.state = torch.zeros(3)
        self.register_load_state_dict_post_hook(_forgive)

    def forward(  # noqa: PLR0917 - the host's signature
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        assert attention_mask is None
        assert attn_mask_type == AttnMaskType.causal
        assert type(packed_seq_params) is PackedSeqParams
        assert packed_seq_params.qkv_format == "thd"
        assert packed_seq_params.cp_group is None
        assert packed_seq_params.local_cp_size is None
        bounds = packed_seq_params.cu_seqlens_q
        assert bounds is packed_seq_params.cu_seqlens_kv
        assert bounds.dtype == torch.int32
        bounds = bounds.tolist()
        assert bounds[-1] == len(query)
        longest = max(b - a for a, b in itertools.pairwise(bounds))
        assert packed_seq_params.max_seqlen_q == packed_seq_params.max_seqlen_kv == longest
        assert query.shape[1:] == (self.num_heads, self.channels[0])
        assert key.shape[1:] == (self.num_groups, self.channels[0])
        assert value.shape[1:] == (self.num_groups, self.channels[1])
        assert self.channels[0] == self.channels[1], "THD kernels want one head dimension"
        out = self.documents(query, key, value, SimpleNamespace(pack_bounds=bounds))
        return out.reshape(len(out), -1)

    def get_extra_state(self) -> torch.Tensor:
        return self.state

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        return {f"{prefix}softmax_offset": (sharded_offsets, metadata)}


def _forgive(module: torch.nn.Module, incompatible_keys: Any) -> None:
    for key in list(incompatible_keys.missing_keys):
        if "core_attention._extra_state" in key:
            incompatible_keys.missing_keys.remove(key)


def train_with_stand_in(argv: list[str]) -> dict[str, Any]:
    """The TE core attention around the stand-in, in layers of the local backend."""
    from tests.distributed.jobs import train

    te_attention.TEDotProductAttention = StandInTE
    local_spec = layer_spec.hbp_layer_spec

    def spec(model_config: Any, vp_stage: int | None = None, *, cp_sizes: tuple[int, ...]) -> Any:
        block = local_spec(model_config, vp_stage, cp_sizes=cp_sizes)
        for layer in block.layer_specs:
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = layer_spec.te_core_attention(cp_sizes)
        return block

    layer_spec.hbp_layer_spec = spec
    return train(argv, with_gradients=True)
