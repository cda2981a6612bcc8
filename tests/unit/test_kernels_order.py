"""Shuffling and sorting equal tests/reference.py exactly."""

import numpy as np
import pytest

from megatron_hbp import _C
from tests import reference
from tests.unit.kernel_cases import FEW_ITEMS, ITEM_TYPES, LARGEST, items_of, pairs


@pytest.mark.parametrize("dtype", ITEM_TYPES)
@pytest.mark.parametrize("num", [0, 1, 2, 500, FEW_ITEMS - 1, FEW_ITEMS, FEW_ITEMS + 6])
def test_descending(num, dtype):
    rng = np.random.default_rng(num)
    # one length for all, runs over the middle, nearly all different, more digits of the radix sort
    for longest in (1, 2, 40, 5000, LARGEST):
        lengths = rng.integers(1, longest + 1, num)
        items = items_of(lengths, dtype, rng.permutation(num))
        wanted = reference.descending(pairs(items), 11)
        _C.sort_descending(items, 11)
        assert pairs(items) == wanted


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    "num", [0, 1, 3, 4, 5, 300, 4096, 4097, 8193, FEW_ITEMS - 1, FEW_ITEMS + 5]
)
def test_shuffled_by_level(num, dtype, wide):
    kernel = _C.shuffled_by_level_wide if wide else _C.shuffled_by_level
    rng = np.random.default_rng(num)
    lengths = rng.integers(0, 1001, num).astype(dtype)
    chosen = rng.integers(0, max(num, 1), num // 2).astype(np.int64 if wide else np.int32)
    for seed, limits in ((0, [1000]), (2**64 - 1, [0, 1000]), (9, [250, 500, 500, LARGEST])):
        for ids in (None, chosen):
            items, starts = kernel(lengths, np.array(limits), seed, ids)
            assert items.dtype == (_C.ITEM64 if wide else _C.ITEM32)
            wanted = reference.shuffled_by_level(lengths, limits, seed, ids)
            assert pairs(items) == wanted[0]
            assert starts.tolist() == wanted[1]


def test_shuffled_by_level_with_most_buckets():
    num = 2048 * 4096 + 1
    items, starts = _C.shuffled_by_level(np.ones(num, dtype=np.int32), np.array([1]), 3)
    assert starts.tolist() == [0, num]
    order = items["id"]
    assert (np.bincount(order, minlength=num) == 1).all()
    # place i of the input is in the bucket that the upper 11 of its 16 random bits name
    words = reference.mix(3 + np.arange(1, num // 4 + 2, dtype=np.uint64) * reference.GOLDEN)
    bits = (words[:, None] >> np.array([0, 16, 32, 48], dtype=np.uint64)) & np.uint64(0xFFFF)
    buckets = (bits.ravel()[:num] >> np.uint64(5)).astype(np.int64)
    assert (np.diff(buckets[order]) >= 0).all()
    size = np.bincount(buckets)
    for number in (0, 2047):
        first = int(size[:number].sum())
        expected = np.flatnonzero(buckets == number).tolist()
        reference.Random(reference.mix(3) + number).shuffle(expected)
        assert order[first : first + size[number]].tolist() == expected


def test_shuffled_by_level_is_uniform():
    """Every length lands everywhere: mean place by quarter of the input, within 5 sigma."""
    num = 40000
    items, _ = _C.shuffled_by_level(np.ones(num, dtype=np.int32), np.array([1]), 5)
    place = np.empty(num)
    place[items["id"]] = np.arange(num)
    means = place.reshape(4, -1).mean(axis=1)
    assert (abs(means - num / 2) < 5 * num / np.sqrt(12 * num / 4)).all()
