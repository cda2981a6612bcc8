"""The kernels that put a rank's part of a pack together: against a slow copy; what they refuse."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hbp import _C


@st.composite
def packs(draw):
    """(bounds, lengths, corpora, corpus of each sequence, starts, low, size, weights)."""
    dtype = draw(st.sampled_from([np.uint16, np.int32]))
    lengths = draw(st.lists(st.integers(1, 12), min_size=0, max_size=6))
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    tail = draw(st.lists(st.integers(1, 6), min_size=0 if lengths else 1, max_size=3))
    documents = [n + gap for n, gap in zip(lengths, gaps, strict=True)] + tail
    bounds = np.cumsum([0, *documents]).astype(np.int32)
    size = draw(st.integers(1, int(bounds[-1])))
    low = draw(st.integers(0, int(bounds[-1]) - size))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    corpora = [
        (random.integers(0, 60_000, 40).astype(dtype), random.integers(0, 2, 40).astype(np.uint8))
        for _ in range(2)
    ]
    corpus = random.integers(0, 2, len(lengths)).astype(np.int32)
    starts = np.array([random.integers(0, 40 - n + 1) for n in lengths], dtype=np.int64)
    weights = random.random(len(lengths)).astype(np.float32)
    return bounds, np.array(lengths, np.int64), corpora, corpus, starts, low, size, weights


@settings(max_examples=300, deadline=None)
@given(packs())
def test_equal_to_a_slow_copy(pack):
    bounds, lengths, corpora, corpus, starts, low, size, weights = pack
    total = int(bounds[-1])
    positions, padding = np.zeros(total, np.int64), np.ones(total, bool)
    tokens, targets = np.full(total, -1), np.zeros(total, np.int64)
    loss_weights = np.zeros(total, np.float32)
    trained = np.zeros(total, bool)
    for document, (begin, end) in enumerate(pairwise(bounds)):
        positions[begin:end] = range(end - begin)
        if document >= len(lengths):
            continue
        length = int(lengths[document])
        values, masks = corpora[corpus[document]]
        own = values[starts[document] : starts[document] + length].astype(np.int64)
        mask = masks[starts[document] : starts[document] + length] != 0
        padding[begin : begin + length] = False
        tokens[begin:end] = np.resize(own, end - begin)
        targets[begin : begin + length - 1] = own[1:]
        loss_weights[begin : begin + length - 1] = np.where(mask[1:], weights[document], 0)
        trained[begin : begin + length - 1] = mask[1:]
    here = slice(low, low + size)
    got_positions, got_padding = _C.pack_layout(bounds, lengths, low, size)
    np.testing.assert_array_equal(got_positions, positions[here])
    np.testing.assert_array_equal(got_padding, padding[here])
    where = (bounds, lengths, low, size, corpus, starts, *map(list, zip(*corpora, strict=True)))
    known = tokens[here] >= 0  # the tail is the caller's
    np.testing.assert_array_equal(_C.pack_tokens(*where)[known], tokens[here][known])
    got_targets, got_weights, num_trained = _C.pack_targets(*where, weights)
    np.testing.assert_array_equal(got_targets, targets[here])
    np.testing.assert_array_equal(got_weights, loss_weights[here])
    assert num_trained == trained[here].sum()


GOOD = {
    "bounds": np.array([0, 4, 10], np.int32),
    "lengths": np.array([4, 5], np.int64),
    "low": 0,
    "size": 10,
    "corpus": np.array([0, 0], np.int32),
    "starts": np.array([0, 3], np.int64),
    "tokens": [np.arange(8, dtype=np.int32)],
    "masks": [np.ones(8, np.uint8)],
}


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"bounds": np.array([1, 4, 10], np.int32)}, "bounds must start at 0"),
        ({"bounds": np.array([0], np.int32)}, "bounds must start at 0 and name a document"),
        ({"bounds": np.array([0, 4, 4], np.int32)}, "bounds must rise"),
        ({"bounds": np.array([0, 10], np.int32)}, "a document for each sequence"),
        ({"lengths": np.array([4, 7], np.int64)}, "a sequence must fit its document"),
        ({"lengths": np.array([4, 0], np.int64)}, "a sequence must fit its document"),
        ({"low": -1}, "the part must lie in the pack"),
        ({"size": 11}, "the part must lie in the pack"),
        ({"size": 0}, "the part must lie in the pack"),
        ({"corpus": np.array([0, 1], np.int32)}, "corpus must number the corpora"),
        ({"corpus": np.array([0], np.int32)}, "must be equally long"),
        ({"starts": np.array([0, 4], np.int64)}, "a sequence must lie in its corpus"),
        ({"starts": np.array([-1, 3], np.int64)}, "a sequence must lie in its corpus"),
        ({"masks": []}, "there must be a mask for each corpus"),
        ({"masks": [np.ones(7, np.uint8)]}, "a sequence must lie in its corpus"),
    ],
)
def test_what_would_read_or_write_elsewhere_is_refused(changed, rule):
    assert _C.pack_tokens(**GOOD).tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 7, 3]
    with pytest.raises(ValueError, match=rule):
        _C.pack_tokens(**GOOD | changed)
    with pytest.raises(ValueError, match=rule):
        _C.pack_targets(**GOOD | changed, weights=np.ones(2, np.float32))


def test_other_types_are_refused():
    for changed in ({"bounds": np.array([0, 4, 10])}, {"tokens": [np.arange(8)]}):
        with pytest.raises(TypeError):
            _C.pack_tokens(**GOOD | changed)
    with pytest.raises(ValueError, match="a weight for each sequence"):
        _C.pack_targets(**GOOD, weights=np.ones(3, np.float32))
