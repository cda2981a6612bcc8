"""Attention of documents and its split over heads, against dense attention with a mask."""

import itertools

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs the extra [train]")

from megatron_hbp.host.attention import (
    DocumentAttention,
    PositionedRotary,
    check_heads,
    repeat_kv_heads,
)
from megatron_hbp.host.packed import HbpPackedSeqParams

BOUNDS = (0, 7, 8, 20, 32)


def _pack(bounds=BOUNDS):
    return HbpPackedSeqParams(
        pack_cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        pack_bounds=tuple(bounds),
        pack_max_seqlen=max(b - a for a, b in itertools.pairwise(bounds)),
    )


def _inputs(heads, kv_heads, dim, v_dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, v_dim))
    return [
        torch.randn(32, *shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]


def _dense(q, k, v, scale=None, bounds=BOUNDS):
    """Scores of all pairs, those outside a document or ahead of the query masked away."""
    document = torch.bucketize(torch.arange(len(q)), torch.tensor(bounds[1:]), right=True)
    allowed = (document[:, None] == document[None]) & torch.ones(len(q), len(q)).tril().bool()
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim", "scale"),
    [(4, 4, 8, 8, None), (4, 2, 8, 8, None), (4, 1, 8, 8, 0.3), (4, 4, 24, 16, 0.2)],
    ids=["mha", "gqa", "mqa", "mla-v-narrower-than-q"],
)
def test_documents_equal_dense_attention_with_a_block_diagonal_causal_mask(
    heads, kv_heads, dim, v_dim, scale
):
    """Outputs and the gradients of q, k and v in fp64, to 1e-12."""
    inputs = _inputs(heads, kv_heads, dim, v_dim)
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    out = DocumentAttention(scale)(*inputs, _pack())
    expected = _dense(*copies, scale)
    assert out.shape == (32, heads, v_dim)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, theirs in zip(inputs, copies, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)


def test_other_boundaries_give_another_result():
    """So that equality above is not blind to them."""
    inputs = _inputs(4, 4, 8, 8)
    out = DocumentAttention(None)(*inputs, _pack())
    shifted = DocumentAttention(None)(*inputs, _pack((0, 6, 8, 20, 32)))
    changed = (out != shifted).any(dim=2).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [6, 7]


def test_inputs_need_not_be_contiguous():
    base = torch.randn(4, 3, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    views = [base[:, i].permute(2, 0, 1) for i in range(3)]
    assert not any(view.is_contiguous() for view in views)
    expected = DocumentAttention(None)(*(view.contiguous() for view in views), _pack())
    torch.testing.assert_close(
        DocumentAttention(None)(*views, _pack()), expected, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("kv_heads", "cp_size", "copies"), [(1, 4, 4), (2, 4, 2), (4, 4, 1)])
def test_repeated_heads_sum_their_gradients(kv_heads, cp_size, copies):
    x = torch.arange(3.0 * kv_heads * 2).reshape(3, kv_heads, 2).requires_grad_()
    repeated = repeat_kv_heads(x, cp_size)
    assert repeated.shape == (3, kv_heads * copies, 2)
    for head in range(repeated.shape[1]):
        torch.testing.assert_close(repeated[:, head], x[:, head // copies])
    weight = torch.arange(1.0, 1.0 + repeated.shape[1])
    (repeated * weight[:, None]).sum().backward()
    expected = weight.reshape(kv_heads, copies).sum(1)
    torch.testing.assert_close(x.grad, expected[:, None].expand(3, kv_heads, 2))


@pytest.mark.parametrize(
    "numbers", [(16, 16, 1), (16, 16, 16), (16, 2, 4), (16, 8, 4), (12, 4, 12)]
)
def test_heads_that_can_be_split(numbers):
    check_heads(*numbers)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((4, 4, 8), "CP size 8 does not divide the 4 attention heads of a tensor-parallel rank"),
        ((12, 12, 8), "CP size 8 does not divide the 12 attention heads of a tensor-parallel rank"),
        (
            (12, 4, 6),
            "CP size 6 and the 4 key/value heads of a tensor-parallel rank: neither divides the "
            "other; use another CP size",
        ),
    ],
)
def test_heads_that_cannot_be_split(numbers, message):
    with pytest.raises(ValueError, match=message):
        check_heads(*numbers)


class _Table(torch.nn.Module):
    """A rotary embedding whose row p holds p."""

    def __init__(self, scale=None):
        super().__init__()
        self.scale = scale
        self.asked = []

    def forward(self, max_seq_len, packed_seq=False):
        self.asked.append((max_seq_len, packed_seq))
        table = torch.arange(float(max_seq_len)).reshape(-1, 1, 1, 1)
        return table if self.scale is None else (table, self.scale)

    def get_cached_cos_sin(self, seq_len, offset=0, dtype=torch.float32, packed_seq=False):
        self.asked.append((seq_len, packed_seq))
        rows = torch.arange(float(seq_len), dtype=dtype).reshape(-1, 1)
        return rows, -rows


def test_positioned_rotary_gives_each_token_the_row_of_its_position():
    """As MLA calls it: the length it asks for is the pack, and the table has the longest pack's."""
    positions = torch.tensor([5, 6, 0, 1, 2])
    pack = HbpPackedSeqParams(local_positions=positions, rotary_rows=64)
    plain, yarn = PositionedRotary(_Table()), PositionedRotary(_Table(scale=1.5))
    assert plain.get_rotary_seq_len(None, None, None, None, pack) is pack
    torch.testing.assert_close(plain(pack).flatten(), positions.float())
    rows, scale = yarn(pack, packed_seq=True)
    torch.testing.assert_close(rows.flatten(), positions.float())
    assert scale == 1.5
    cos, sin = yarn.get_cached_cos_sin(pack, dtype=torch.float64, packed_seq=True)
    torch.testing.assert_close(cos.flatten(), positions.double())
    torch.testing.assert_close(sin.flatten(), -positions.double())
    assert plain.inner.asked + yarn.inner.asked == [(64, True)] * 3


@pytest.mark.parametrize("cp_size", [2, 4])
def test_ulysses_equals_attention_on_one_rank(cluster, cp_size):
    """Round trips are the identity, outputs and gradients those of one rank, to 1e-12 in fp64.

    Multi-head, fewer key/value heads than ranks, and MLA's narrower value; non-contiguous inputs.
    """
    for result in cluster.run(cp_size, "tests.distributed.jobs_attention:ulysses"):
        assert set(result) == {
            "round trip",
            "round trip gradient",
            "heads of the whole pack",
            *(f"{name} {what}" for name in ("mha", "mqa", "mla") for what in ("out", "gradient")),
        }
        for name, difference in result.items():
            assert difference <= 1e-12, (name, difference)
