"""Items for tests of the kernels."""

import numpy as np

from megatron_hbp import _C

ITEM_TYPES = (_C.ITEM32, _C.ITEM64)
FEW_ITEMS = 1 << 15  # from here on kernels use two threads
EDGES = (1, 2, 63, 64, 65, 4095, 4096, 4097, 262143, 262144, 262145)  # of words of the bit set
LARGEST = 2**31 - 1


def items_of(lengths, dtype, ids=None):
    items = np.empty(len(lengths), dtype=dtype)
    items["id"] = np.arange(len(lengths)) if ids is None else ids
    items["length"] = lengths
    return items


def pairs(items):
    return [(int(i), int(length)) for i, length in items.tolist()]


def small_cases():
    """(lengths, capacity, multiple): about 1200 lists of up to 60 lengths."""
    rng = np.random.default_rng(0)
    for turn in range(900):
        capacity = int(rng.integers(1, 300))
        num = int(rng.integers(0, 60))
        multiple = 1 if turn % 3 else int(rng.integers(1, min(capacity, 17) + 1))
        longest = capacity // multiple * multiple
        yield rng.integers(1, longest + 1, num), capacity, multiple
    for capacity in (*EDGES, LARGEST - 1, LARGEST):
        yield np.array([capacity]), capacity, 1
        yield np.array([1]), capacity, capacity
        yield np.full(20, capacity), capacity, 1
        yield np.full(20, (capacity + 1) // 2), capacity, 1
        yield np.full(40, max(1, capacity // 3)), capacity, 1
        yield rng.integers(1, capacity + 1, 60), capacity, 1
        yield rng.integers(max(1, capacity - 3), capacity + 1, 30), capacity, 1
        yield rng.integers(1, min(capacity, 5) + 1, 60), capacity, 1
        yield np.minimum(np.exp(rng.normal(0, 4, 60)).astype(np.int64) + 1, capacity), capacity, 1
        for multiple in (2, 3, 64, 128):
            if multiple <= capacity:
                longest = capacity // multiple * multiple
                yield rng.integers(1, longest + 1, 40), capacity, multiple
    yield np.array([], dtype=np.int64), 10, 1
    yield np.full(40, 7), 7, 1
    yield np.full(40, 7), 20, 1
    yield np.full(40, 1), 64, 1
    yield np.array([1, 2, 3]), 5, 4  # 5 tokens hold one multiple of 4


SMALL_CASES = list(small_cases())
