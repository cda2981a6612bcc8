"""Ulysses around Transformer Engine's attention (TE 2.7 or later). Never run on a GPU.

One TE attention cannot serve several CP sizes (it asserts its numbers of heads and groups), so
there is one per CP size, each built from a config copy with heads and key/value groups / CP and
with its own context parallelism off.

Guarantees (tests/host/test_te_attention.py, with a stand-in for TE on CPU):
- a checkpoint has exactly the keys of the stock TE model, in both directions: the attention of the
  smallest CP size speaks for all in what is saved, all of them get what is loaded;
- TE sees the pack's own boundaries and longest document, never the host's [0, S].
Not done: FP8 attention (several amax histories for one key), attention logits for qk-clip.
"""

import copy
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_pg_size

from megatron_hbp.host.attention import UlyssesAttention, check_heads
from megatron_hbp.host.packed import HbpPackedSeqParams


class TEDocumentAttention:
    """Causal attention inside each document of a pack by TE: [T, H, D] -> [T, H, Dv].

    Not a module: its TE attentions must not show up as children of the core attention.
    """

    def __init__(
        self,
        cp_sizes: tuple[int, ...],
        *,
        config: Any,
        k_channels: int | None,
        v_channels: int | None,
        pg_collection: Any,
        **arguments: Any,
    ) -> None:
        """arguments: those of TEDotProductAttention that are the same for all CP sizes."""
        self._config = config
        # the host pads MLA's value to the query's width for THD; so do we, after the all-to-all
        self._v_padding = 0
        if k_channels is not None and v_channels is not None:
            self._v_padding = k_channels - v_channels
            v_channels = k_channels
        tp_size = get_pg_size(pg_collection.tp)
        self.by_cp_size = {
            cp_size: TEDotProductAttention(
                config=_config_for(config, cp_size, tp_size),
                k_channels=k_channels,
                v_channels=v_channels,
                pg_collection=pg_collection,
                **arguments,
            )
            for cp_size in sorted(cp_sizes)
        }

    @property
    def speaker(self) -> Any:
        """The attention that stands for all in checkpoints: the one of the smallest CP size."""
        return next(iter(self.by_cp_size.values()))

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        pack: HbpPackedSeqParams,
    ) -> torch.Tensor:
        bounds, longest = pack.pack_cu_seqlens, pack.pack_max_seqlen
        assert bounds is not None
        v_dim = v_TKD.shape[-1]
        if self._v_padding:
            v_TKD = torch.nn.functional.pad(v_TKD, [0, self._v_padding])
        out = self.by_cp_size[pack.pack_cp_size](
            q_THD,
            k_TKD,
            v_TKD,
            attention_mask=None,
            attn_mask_type=AttnMaskType.causal,
            packed_seq_params=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=bounds,
                cu_seqlens_kv=bounds,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
        )
        return out.reshape(*q_THD.shape[:2], -1)[..., :v_dim]


def _config_for(config: Any, cp_size: int, tp_size: int) -> Any:
    """The config of the attention that one CP rank computes: its heads and groups, without CP."""
    num_heads, num_groups = config.num_attention_heads, config.num_query_groups
    # with more tensor-parallel ranks than groups each rank has a copy of one
    check_heads(num_heads // tp_size, max(1, num_groups // tp_size), cp_size)
    config = copy.copy(config)
    config.num_attention_heads = num_heads // cp_size
    # fewer groups than CP ranks are repeated before the all-to-all
    config.num_query_groups = max(num_groups // tp_size, cp_size) // cp_size * tp_size
    config.context_parallel_size = 1
    return config


class TEUlyssesAttention(UlyssesAttention):
    """The core attention of the TE layer specs."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        cp_sizes: tuple[int, ...] = (1,),
    ) -> None:
        """cp_sizes: those of the plan's levels; given by the layer spec."""
        _check_config(config)
        shared = {
            "config": config,
            "layer_number": layer_number,
            "attn_mask_type": attn_mask_type,
            "attention_type": attention_type,
            "attention_dropout": attention_dropout,
            "softmax_scale": softmax_scale,
            "k_channels": k_channels,
            "v_channels": v_channels,
            "pg_collection": pg_collection,
        }
        super().__init__(**shared, documents=TEDocumentAttention(cp_sizes, **shared))
        self.register_load_state_dict_post_hook(_forgive_missing_state)

    def train(self, mode: bool = True) -> "TEUlyssesAttention":
        super().train(mode)
        for attention in self.documents.by_cp_size.values():
            attention.train(mode)
        return self

    def get_extra_state(self) -> Any:
        return self.documents.speaker.get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        for attention in self.documents.by_cp_size.values():
            attention.set_extra_state(state)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        return self.documents.speaker.sharded_state_dict(
            prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata
        )


def _forgive_missing_state(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """As TE's own attention: a checkpoint without its extra state loads strictly."""
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if not key.endswith("core_attention._extra_state")]


def _check_config(config: Any) -> None:
    for field, reason in (
        ("fp8_dot_product_attention", "each CP size would keep its own scaling history"),
        ("fp8_multi_head_attention", "each CP size would keep its own scaling history"),
        ("qk_clip", "the logits of one CP size's heads are not those of the layer"),
        ("log_max_attention_logit", "the logits of one CP size's heads are not those of the layer"),
    ):
        if getattr(config, field):
            raise ValueError(
                f"{field} is not supported with HBP under transformer_engine: {reason}; turn it off"
            )
