"""Ulysses attention over the CP group that travels with the pack, and rotary by local position.

Shapes: S tokens on this rank, T = S x CP tokens of the pack, H heads per tensor-parallel rank,
K key/value heads per tensor-parallel rank, D head dimension.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from megatron_hbp.host.mla_norms import norms_of
from megatron_hbp.host.packed import HbpPackedSeqParams


class _AllToAll(torch.autograd.Function):
    """Chunk i of dimension 0 goes to rank i; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, chunks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchange(chunks, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exchange(grads[0], ctx.group), None


def _exchange(chunks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # empty_like keeps the strides of what it is given: a view would come back scrambled
    chunks = chunks.contiguous()
    received = torch.empty_like(chunks)
    dist.all_to_all_single(received, chunks, group=group)
    return received


def sequence_to_heads(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """[S, H_i, D_i] with this rank's tokens -> [T, H_i / CP, D_i] with this rank's heads.

    One all-to-all for all tensors. Every H_i must be a multiple of the CP size.
    """
    cp_size = group.size()
    num_tokens = tensors[0].shape[0]
    flat = [t.reshape(num_tokens, cp_size, -1).transpose(0, 1) for t in tensors]
    received = _AllToAll.apply(torch.cat(flat, dim=-1), group)
    parts = received.reshape(cp_size * num_tokens, -1).split([f.shape[-1] for f in flat], dim=-1)
    return [
        part.reshape(cp_size * num_tokens, t.shape[1] // cp_size, t.shape[2])
        for part, t in zip(parts, tensors, strict=True)
    ]


def heads_to_sequence(out_THD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T, H / CP, D] with this rank's heads -> [S, H, D] with this rank's tokens."""
    cp_size = group.size()
    total, heads, dim = out_THD.shape
    chunks = out_THD.reshape(cp_size, total // cp_size, heads, dim)
    received = _AllToAll.apply(chunks, group)
    return received.transpose(0, 1).reshape(total // cp_size, cp_size * heads, dim)


def check_heads(num_heads: int, num_kv_heads: int, cp_size: int) -> None:
    """Raises ValueError unless Ulysses can split the heads of one tensor-parallel rank.

    cp_size must divide the query heads; key/value heads must divide it or be divided by it (fewer
    heads than CP ranks are repeated).
    """
    if num_heads % cp_size:
        raise ValueError(
            f"CP size {cp_size} does not divide the {num_heads} attention heads of a "
            "tensor-parallel rank; use a CP size that does, or less tensor parallelism"
        )
    if num_kv_heads % cp_size and cp_size % num_kv_heads:
        raise ValueError(
            f"CP size {cp_size} and the {num_kv_heads} key/value heads of a tensor-parallel rank: "
            "neither divides the other; use another CP size"
        )


def repeat_kv_heads(x_SKD: torch.Tensor, cp_size: int) -> torch.Tensor:
    """Repeats key/value heads so that every CP rank gets one; autograd sums their gradients."""
    num_heads = x_SKD.shape[1]
    if num_heads >= cp_size:
        return x_SKD
    return x_SKD.repeat_interleave(cp_size // num_heads, dim=1)


class DocumentAttention(torch.nn.Module):
    """Causal attention inside each document of a pack, without CP: [T, H, D] -> [T, H, Dv].

    On CUDA in bf16 or fp16 one `torch.nn.attention.varlen` call (torch 2.12 or later); elsewhere
    one SDPA call per document.
    """

    def __init__(self, softmax_scale: float | None) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        pack: HbpPackedSeqParams,
    ) -> torch.Tensor:
        v_dim = v_TKD.shape[-1]
        if v_dim < q_THD.shape[-1]:  # flash kernels, also the CPU's, want one head dimension
            v_TKD = torch.nn.functional.pad(v_TKD, [0, q_THD.shape[-1] - v_dim])
        on_gpu = q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16)
        attend = self._varlen if on_gpu else self._per_document
        return attend(q_THD, k_TKD, v_TKD, pack)[..., :v_dim]

    def _varlen(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        pack: HbpPackedSeqParams,
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            query=q_THD.contiguous(),
            key=k_TKD.contiguous(),
            value=v_TKD.contiguous(),
            cu_seq_q=pack.pack_cu_seqlens,
            cu_seq_k=pack.pack_cu_seqlens,
            max_q=pack.pack_max_seqlen,
            max_k=pack.pack_max_seqlen,
            scale=self.softmax_scale,
            window_size=(-1, 0),
            enable_gqa=q_THD.shape[1] != k_TKD.shape[1],
        )
        assert isinstance(out, torch.Tensor)
        return out

    def _per_document(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        pack: HbpPackedSeqParams,
    ) -> torch.Tensor:
        outputs = []
        for start, end in zip(pack.pack_bounds, pack.pack_bounds[1:], strict=False):
            q, k, v = (x[start:end].transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
            out = torch.nn.functional.scaled_dot_product_attention(
                query=q,
                key=k,
                value=v,
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs, dim=0)


class UlyssesAttention(MegatronModule):
    """The core attention that the layer specs put in: Ulysses around a document attention.

    Has no parameters, so that checkpoints of the stock model load.
    """

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
        documents: Any = None,
    ) -> None:
        """documents: the attention without CP, called as DocumentAttention is (its default)."""
        super().__init__(config=config)
        self.v_channels = v_channels
        self.documents: Any = DocumentAttention(softmax_scale) if documents is None else documents

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: HbpPackedSeqParams | None = None,
    ) -> torch.Tensor:
        """[S, H, D], [S, K, D], [S, K, Dv] -> [S, H x Dv]; MLA gets its true Dv, unpadded: 3-D."""
        assert isinstance(packed_seq_params, HbpPackedSeqParams), "HBP attention without a pack"
        group = packed_seq_params.pack_cp_group
        if self.v_channels is not None:  # the host pads MLA's value to the query's width
            value = value[..., : self.v_channels]
        if group is None:
            out = self.documents(query, key, value, packed_seq_params)
        else:
            cp_size = group.size()
            key, value = repeat_kv_heads(key, cp_size), repeat_kv_heads(value, cp_size)
            query, key, value = sequence_to_heads([query, key, value], group)
            out = self.documents(query, key, value, packed_seq_params)
            out = heads_to_sequence(out, group)
        return out if self.v_channels is not None else out.reshape(out.shape[0], -1)


class PositionedRotary(torch.nn.Module):
    """Stands in for MLA's rotary embedding: rows chosen by each token's position in its document.

    MLA hands the answer of `get_rotary_seq_len` straight to `forward` (or `get_cached_cos_sin`): we
    answer with the pack itself.
    """

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: HbpPackedSeqParams,
    ) -> HbpPackedSeqParams:
        return packed_seq_params

    def forward(self, pack: HbpPackedSeqParams, packed_seq: bool = False) -> Any:
        table = self.inner(pack.rotary_rows, packed_seq=True)
        if isinstance(table, tuple):  # YaRN: the table and its scale
            return pack.rotary_at_positions(table[0]), table[1]
        return pack.rotary_at_positions(table)

    def get_cached_cos_sin(
        self, pack: HbpPackedSeqParams, dtype: torch.dtype, packed_seq: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.inner.get_cached_cos_sin(pack.rotary_rows, dtype=dtype, packed_seq=True)
        return pack.rotary_at_positions(cos), pack.rotary_at_positions(sin)


def positioned_mla(base: type) -> type:
    """A subclass of an MLA self-attention class: rotary by local position, mla_norms' norms."""

    class PositionedMLA(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.rotary_pos_emb = PositionedRotary(self.rotary_pos_emb)

        def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
            return norms_of(self.config, submodules)

    PositionedMLA.__name__ = f"Hbp{base.__name__}"
    return PositionedMLA


def positioned_self_attention(base: type) -> type:
    """A subclass of a GQA/MHA self-attention class with rotary by local position."""

    class PositionedSelfAttention(base):
        def forward(
            self,
            *args: Any,
            rotary_pos_emb: Any = None,
            packed_seq_params: Any = None,
            **kwargs: Any,
        ) -> Any:
            if rotary_pos_emb is not None:
                rotary_pos_emb = packed_seq_params.rotary_at_positions(rotary_pos_emb)
            return super().forward(
                *args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **kwargs
            )

    PositionedSelfAttention.__name__ = f"Hbp{base.__name__}"
    return PositionedSelfAttention
