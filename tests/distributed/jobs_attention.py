"""Ulysses on real ranks against the same attention on one."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_hbp.host.attention import (
    DocumentAttention,
    UlyssesAttention,
    heads_to_sequence,
    sequence_to_heads,
)
from megatron_hbp.host.groups import create_cp_groups
from megatron_hbp.host.packed import HbpPackedSeqParams

HEADS, TOKENS = 4, 48
BOUNDS = (0, 5, 6, 30, 41, 48)  # documents that span ranks, and some that do not
SHAPES = {"mha": (HEADS, 8, 8), "mqa": (1, 8, 8), "mla": (HEADS, 24, 16)}  # K, D, Dv


def start() -> None:
    dist.init_process_group(backend="gloo")
    parallel_state.initialize_model_parallel()


def ulysses() -> dict[str, float]:
    """Largest absolute differences, by name."""
    start()
    cp_size, rank = dist.get_world_size(), dist.get_rank()
    group = create_cp_groups([1, cp_size])[cp_size]
    assert group is not None
    here = slice(rank * TOKENS // cp_size, (rank + 1) * TOKENS // cp_size)
    result = _round_trip(group, here)
    for name, shape in SHAPES.items():
        result |= _against_one_rank(name, group, here, shape)
    return result


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).abs().max())


def _round_trip(group: dist.ProcessGroup, here: slice) -> dict[str, float]:
    cp_size, rank = group.size(), group.rank()
    whole = [_random(TOKENS, heads, 6, seed=heads) for heads in (HEADS, 2 * HEADS)]
    mine = [x[here].clone().requires_grad_() for x in whole]
    split = sequence_to_heads(mine, group)
    differences = []
    for x, got in zip(whole, split, strict=True):
        heads = x.shape[1] // cp_size
        differences.append(_largest(got, x[:, rank * heads : (rank + 1) * heads]))
    back = [heads_to_sequence(x, group) for x in split]
    weights = [_random(*x.shape, seed=rank) for x in back]
    sum((x * w).sum() for x, w in zip(back, weights, strict=True)).backward()
    return {
        "heads of the whole pack": max(differences),
        "round trip": max(_largest(a, b) for a, b in zip(back, mine, strict=True)),
        "round trip gradient": max(_largest(x.grad, w) for x, w in zip(mine, weights, strict=True)),
    }


def _against_one_rank(
    name: str, group: dist.ProcessGroup, here: slice, shape: tuple[int, int, int]
) -> dict[str, float]:
    kv_heads, dim, v_dim = shape
    shapes = ((HEADS, dim), (kv_heads, dim), (kv_heads, v_dim))
    whole = [_random(TOKENS, *shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    pack = HbpPackedSeqParams(
        pack_cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32),
        pack_bounds=BOUNDS,
        pack_max_seqlen=24,
    )
    expected = DocumentAttention(0.25)(*whole, pack)
    weight = _random(*expected.shape, seed=9)
    (expected * weight).sum().backward()

    pack.pack_cp_group = group
    mine = [x.detach()[here].clone().requires_grad_() for x in whole]
    # the transpose of a copy that lies the other way round: equal values, other strides
    query, key, value = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in mine)
    if name == "mla":  # the host pads the value to the query's width
        value = torch.nn.functional.pad(value, [0, dim - v_dim])
    attention = UlyssesAttention(
        config=TransformerConfig(num_layers=1, hidden_size=HEADS * dim, num_attention_heads=HEADS),
        layer_number=1,
        attn_mask_type=None,
        attention_type="self",
        softmax_scale=0.25,
        v_channels=v_dim if name == "mla" else None,
    )
    out = attention(query, key, value, attention_mask=None, packed_seq_params=pack)
    assert out.ndim == (3 if name == "mla" else 2)
    out = out.reshape(-1, HEADS, v_dim)
    (out * weight[here]).sum().backward()
    gradients = [_largest(x.grad, w.grad[here]) for x, w in zip(mine, whole, strict=True)]
    return {f"{name} out": _largest(out, expected[here]), f"{name} gradient": max(gradients)}
