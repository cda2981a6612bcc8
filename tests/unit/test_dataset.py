"""What each rank is handed of a pack, all ranks in one process, against a slow copy."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron_hbp.alignment import Alignment, alignment, round_up
from megatron_hbp.dataset import TAIL_DOCUMENT, HbpDataset, pack_layout
from megatron_hbp.level import Level
from megatron_hbp.plan import DROP_EMPTY, DROP_UNTRAINABLE
from megatron_hbp.planner import build_plan
from tests.unit.memory_corpus import MemoryCorpus, one_pack_plan, random_memory_corpus


@dataclass
class WholePack:
    """The items of a pack's ranks, put together again."""

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    padding: np.ndarray
    positions: np.ndarray
    bounds: list[int]
    num_trained: int


def _whole(plan, corpus, microbatch=0, replica=0, **options) -> WholePack:
    cp_size = plan.levels[plan.microbatch_level[microbatch]].cp_size
    ranks = range(replica * cp_size, (replica + 1) * cp_size)
    items = [HbpDataset(plan, corpus, rank, **options)[microbatch] for rank in ranks]
    assert len({tuple(item["cu_seqlens"].tolist()) for item in items}) == 1
    assert [item["cp_rank"] for item in items] == list(range(cp_size))

    def joined(name):
        return np.concatenate([item[name].numpy().reshape(-1) for item in items])

    return WholePack(
        tokens=joined("tokens"),
        labels=joined("labels"),
        weights=joined("loss_weights"),
        padding=joined("padding_mask"),
        positions=joined("positions"),
        bounds=items[0]["cu_seqlens"].tolist(),
        num_trained=sum(int(item["num_trained"]) for item in items),
    )


def _mixed_plan(seed, multiple=1, **options):
    """Three levels over four ranks, three micro-batches a step."""
    rng = np.random.default_rng(seed)
    lens = np.minimum(rng.lognormal(2.2, 1.0, 60).astype(int) + 2, 128).tolist()
    lens += [128, 127, 90]
    corpus = random_memory_corpus(lens, seed=seed)
    plan = build_plan(
        corpus.seq_lens,
        (Level(32, 1), Level(64, 2), Level(128, 4)),
        4,
        num_microbatches=3,
        seed=seed,
        alignment=Alignment(1, (multiple,) * 3),
        first_trained=corpus.first_trained,
        **options,
    )
    assert plan.audit(corpus.seq_lens) == []
    return plan, corpus


def _packs(plan):
    for microbatch, level in enumerate(plan.microbatch_level):
        for replica in range(plan.num_ranks // plan.levels[level].cp_size):
            yield microbatch, replica


@pytest.mark.parametrize(("seed", "multiple"), [(0, 1), (1, 1), (2, 4), (3, 8)])
def test_every_pack_equals_its_sequences(seed, multiple):
    """Tokens, labels, weights, padding and positions of every document, token by token."""
    plan, corpus = _mixed_plan(seed, multiple)
    for microbatch, replica in _packs(plan):
        pack = _whole(plan, corpus, microbatch, replica)
        ids = plan.pack(int(plan.microbatch_offsets[microbatch]) + replica)
        size = plan.levels[plan.microbatch_level[microbatch]].pack_len
        padding, weights = np.ones(size, dtype=bool), np.zeros(size)
        start = 0
        for place, i in enumerate(ids):
            assert pack.bounds[place] == start
            tokens, mask = corpus.tokens(i), corpus.mask(i)
            length = len(tokens)
            np.testing.assert_array_equal(pack.tokens[start : start + length], tokens)
            np.testing.assert_array_equal(pack.labels[start : start + length - 1], tokens[1:])
            weights[start : start + length - 1] = mask[1:]
            padding[start : start + length] = False
            start += -(-length // multiple) * multiple
        assert pack.bounds[len(ids)] == start
        np.testing.assert_array_equal(pack.weights, weights)
        np.testing.assert_array_equal(pack.padding, padding)
        assert pack.num_trained == weights.sum() == corpus.num_trained[ids].sum()
        in_document = np.concatenate([np.arange(n) for n in np.diff(pack.bounds)])
        np.testing.assert_array_equal(pack.positions, in_document)


def test_br_d14_arrays_have_one_length():
    """Documents that sum to 1021, multiple 8: every per-token array has the pack's 1024 tokens."""
    corpus = random_memory_corpus([509, 512])
    plan = build_plan(corpus.seq_lens, [Level(1024, 1)], 1, alignment=Alignment(8, (8,)))
    item = HbpDataset(plan, corpus, 0)[0]
    for name in ("tokens", "labels", "padding_mask"):
        assert item[name].shape == (1, 1024), name
    for name in ("loss_weights", "positions"):
        assert item[name].shape == (1024,), name
    assert item["cu_seqlens"][-1] == 1024
    assert item["padding_mask"].sum() == 1024 - 1021


def test_br_d15_plain_types_on_every_rank_and_stage():
    plan, corpus = _mixed_plan(0)
    for rank in range(plan.num_ranks):
        for with_tokens, with_labels in ((True, False), (False, False), (False, True)):
            dataset = HbpDataset(
                plan, corpus, rank, with_tokens=with_tokens, with_labels=with_labels
            )
            for item in (dataset[m] for m in range(len(dataset))):
                cu_seqlens = item["cu_seqlens"]
                assert cu_seqlens.dtype == torch.int32
                assert cu_seqlens.is_contiguous()
                steps = cu_seqlens.diff()
                assert cu_seqlens[0] == 0
                assert (steps > 0).all()
                level = plan.levels[item["level"]]
                assert cu_seqlens[-1] == level.pack_len
                assert type(item["max_seqlen"]) is int
                assert item["max_seqlen"] == steps.max()
                assert type(level.cp_size) is int
                assert ("tokens" in item, "labels" in item) == (with_tokens, with_labels)
                for name, value in item.items():
                    assert isinstance(value, torch.Tensor) or type(value) in (int, float, bool), (
                        name
                    )


def test_a_middle_stage_reads_no_tokens():
    plan, corpus = _mixed_plan(0)
    dataset = HbpDataset(plan, corpus, 0, with_tokens=False, with_labels=False)
    before = corpus.reads
    for microbatch in range(len(dataset)):
        dataset[microbatch]
    assert corpus.reads == before


def test_br_a16_plan_and_run_use_one_multiple():
    """[101, 151, 250] at multiple 4: 508 tokens planned are 508 tokens built; 504 refuse them."""
    corpus = random_memory_corpus([101, 151, 250])
    plan = build_plan(corpus.seq_lens, [Level(508, 1)], 1, alignment=Alignment(4, (4,)))
    assert [len(plan.pack(p)) for p in range(plan.num_packs)] == [3]
    item = HbpDataset(plan, corpus, 0)[0]
    assert item["tokens"].shape == (1, 508)
    assert sorted(item["cu_seqlens"].diff().tolist()) == [104, 152, 252]
    smaller = build_plan(corpus.seq_lens, [Level(504, 1)], 1, alignment=Alignment(4, (4,)))
    assert max(len(smaller.pack(p)) for p in range(smaller.num_packs)) == 2
    assert smaller.audit(corpus.seq_lens) == []


def test_a_pack_that_does_not_fit_its_alignment_is_refused():
    with pytest.raises(ValueError, match=r"3 sequences need 508 tokens at a multiple of 4, the pa"):
        pack_layout(np.array([101, 151, 250]), 504, 4)


def test_br_b06_zero_and_one_token_documents():
    """Empty sequences never reach a pack; one-token documents lie in it without loss."""
    lens, first_trained = np.array([1, 0, 1, 5]), np.ones(4, dtype=int)
    plan = build_plan(lens, [Level(8, 1)], 1, first_trained=first_trained)
    assert plan.dropped_ids.tolist() == [0, 1, 2]
    assert plan.dropped_reason.tolist() == [DROP_UNTRAINABLE, DROP_EMPTY, DROP_UNTRAINABLE]
    layout = pack_layout(np.array([1, 1]), 2)
    assert (layout.cu_seqlens.tolist(), layout.max_seqlen) == ([0, 1, 2], 1)
    corpus = MemoryCorpus([([7], [1])] * 7)
    pack = _whole(one_pack_plan(corpus, 7), corpus)
    assert pack.bounds == list(range(8))
    assert pack.num_trained == 0
    assert not pack.weights.any()
    assert pack.positions.tolist() == [0] * 7


def test_br_b07_sequences_shorter_than_the_split():
    """Lengths around TP 2 x CP 8: slices rebuild the input, its loss tokens unchanged.

    The contiguous layout needs no padding of documents; a zigzag layout would need 16.
    """
    lens = [1, 2, 5, 15, 16, 17]
    zigzag = alignment((8,), cp_layout="zigzag", tp_size=2).document_multiples[0]
    assert [round_up(n, zigzag) for n in lens] == [16, 16, 16, 16, 16, 32]
    corpus = random_memory_corpus(lens)
    split = _whole(one_pack_plan(corpus, 64, cp_size=8), corpus)
    whole = _whole(one_pack_plan(corpus, 64), corpus)
    for name in ("tokens", "labels", "weights", "padding", "positions"):
        np.testing.assert_array_equal(getattr(split, name), getattr(whole, name))
    assert split.num_trained == whole.num_trained == corpus.num_trained.sum()


@pytest.mark.parametrize(
    ("cp_size", "lens", "padded"),
    [(4, [2999, 1, 7], [3000, 8, 8]), (2, [7, 5], [8, 8]), (2, [8, 8], [8, 8])],
    ids=["br_e06", "br_d08", "br_d07"],
)
def test_lengths_that_a_ring_does_not_divide(cp_size, lens, padded):
    """Numbers only for a zigzag ring, which is not built; our layout lays documents end to end."""
    multiple = alignment((cp_size,), cp_layout="zigzag").document_multiples[0]
    assert [round_up(n, multiple) for n in lens] == padded
    contiguous = alignment((cp_size,)).document_multiples[0]
    bounds = pack_layout(np.array(lens), sum(lens), contiguous).cu_seqlens
    assert np.diff(bounds).tolist() == lens


def test_br_b08_the_first_answer_token_has_loss():
    corpus = MemoryCorpus([([11, 12, 13, 21, 22, 23, 2], [0, 0, 0, 1, 1, 1, 1])])
    pack = _whole(one_pack_plan(corpus, 7), corpus)
    assert pack.tokens[:6].tolist() == [11, 12, 13, 21, 22, 23]
    assert pack.labels[2:6].tolist() == [21, 22, 23, 2]
    assert pack.weights.tolist() == [0, 0, 1, 1, 1, 1, 0]  # a document's last position has none
    assert pack.num_trained == 4


def test_br_c08_the_end_token_keeps_its_loss_where_it_is_also_the_pad_token():
    document = ([11, 21, 22, 2], [0, 1, 1, 1])
    corpus = MemoryCorpus([document] * 3)
    pack = _whole(one_pack_plan(corpus, 16, cp_size=2), corpus)
    trained_ends = (pack.labels == 2) & (pack.weights > 0)
    assert np.flatnonzero(trained_ends).tolist() == [2, 6, 10]
    assert pack.padding.tolist() == [False] * 12 + [True] * 4
    assert not pack.weights[12:].any()


@pytest.mark.parametrize("multiple", [1, 8])
def test_br_c09_fill_needs_no_pad_token(multiple):
    """Fill is real tokens, so its ids are in range; id 0 is a token like any other."""
    corpus = MemoryCorpus([([5, 0, 6], [0, 1, 1]), ([9, 8, 0, 7, 0, 0, 3], [0, 0, 1, 0, 1, 1, 1])])
    plan = one_pack_plan(corpus, 16) if multiple == 1 else None
    if plan is None:
        plan = build_plan(corpus.seq_lens, [Level(16, 1)], 1, alignment=Alignment(1, (multiple,)))
    pack = _whole(plan, corpus)
    known = {0, 3, 5, 6, 7, 8, 9}
    assert set(pack.tokens.tolist()) <= known
    assert pack.padding.sum() == 6
    assert not pack.weights[pack.padding].any()
    zeros = (pack.labels == 0) & (pack.weights > 0)
    assert zeros.sum() == 4


def test_a_filler_is_real_tokens_without_loss():
    """Ranks without a sequence still route different real tokens, and count none of them."""
    corpus = random_memory_corpus([40, 40, 40])
    plan = build_plan(corpus.seq_lens, [Level(64, 1)], 4)
    assert plan.counts()["filler_packs"] == 1
    packs = [_whole(plan, corpus, 0, rank) for rank in range(4)]
    (filler,) = [pack for pack in packs if pack.padding.all()]
    assert filler.num_trained == 0
    assert not filler.weights.any()
    assert len(set(filler.tokens.tolist())) > 16
    assert set(filler.tokens.tolist()) <= set(np.concatenate([corpus.tokens(i) for i in range(3)]))


def test_br_d12_the_tail_is_one_document():
    corpus = random_memory_corpus([6, 3])
    pack = _whole(one_pack_plan(corpus, 16), corpus)
    assert pack.bounds == [0, 6, 9, 16]
    assert pack.positions.tolist() == [*range(6), *range(3), *range(7)]


def test_a_long_tail_is_cut_into_documents_of_bounded_length():
    layout = pack_layout(np.array([1000]), 10_000)
    assert layout.cu_seqlens.tolist() == [0, 1000, 1000 + TAIL_DOCUMENT, 9192, 10_000]
    assert layout.num_sequences == 1
    assert pack_layout(np.array([], dtype=np.int32), 4096).cu_seqlens.tolist() == [0, 4096]
    assert pack_layout(np.array([1000]), 1000 + TAIL_DOCUMENT).cu_seqlens.tolist() == [
        0,
        1000,
        1000 + TAIL_DOCUMENT,
    ]


def test_a_truncated_sequence_counts_what_is_kept():
    """Trained tokens beyond the cut count nowhere, nor does the first, which is no target."""
    corpus = MemoryCorpus([(list(range(10)), [1, 0, 1, 1, 0, 0, 1, 1, 1, 1])])
    plan = build_plan(
        corpus.seq_lens,
        [Level(7, 1)],
        1,
        overlong="truncate",
        first_trained=corpus.first_trained,
    )
    dataset = HbpDataset(plan, corpus, 0)
    assert dataset.totals.trained_tokens.tolist() == [3]
    item = dataset[0]
    assert item["num_trained"] == 3
    assert item["loss_weights"].tolist() == [0, 1, 1, 0, 0, 1, 0]
    assert item["trained_share"] == pytest.approx(3 / 7)


@pytest.mark.parametrize("pack_len", [131_072, 524_288])
@pytest.mark.parametrize("cp_size", [1, 4])
def test_br_l04_long_packs_are_linear_in_memory(pack_len, cp_size):
    """No tensor with two sequence-sized dimensions; 131,072 tokens take less than 4 MB."""
    corpus = random_memory_corpus([pack_len // 2, pack_len // 4, 100, 50])
    item = HbpDataset(one_pack_plan(corpus, pack_len, cp_size), corpus, 0)[0]
    tensors = [value for value in item.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        assert sum(size > 1 for size in tensor.shape) <= 1, tensor.shape
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert size * cp_size < 4e6 * pack_len / 131_072
