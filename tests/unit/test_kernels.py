"""Packing kernels equal tests/reference.py exactly, on random and on extreme inputs.

test_kernels_order.py and test_kernels_balance.py hold the other kernels.
"""

from bisect import bisect_left, insort

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hbp import _C
from tests import reference
from tests.unit.kernel_cases import (
    ITEM_TYPES,
    LARGEST,
    SMALL_CASES,
    items_of,
    pairs,
)


def check_packing(found, wanted, dtype):
    pack_of, num_packs = found
    assert pack_of.dtype == dtype["id"]
    assert pack_of.tolist() == wanted[0]
    assert num_packs == wanted[1]


@pytest.mark.parametrize("dtype", ITEM_TYPES)
@pytest.mark.parametrize("name", ["best_fit", "first_fit", "next_fit"])
def test_packing_kernel(name, dtype):
    for lengths, capacity, multiple in SMALL_CASES:
        for order in (lengths, np.sort(lengths)[::-1], np.sort(lengths)):
            items = items_of(order, dtype)
            found = getattr(_C, name)(items, capacity, multiple)
            check_packing(found, getattr(reference, name)(pairs(items), capacity, multiple), dtype)


@pytest.mark.parametrize("dtype", ITEM_TYPES)
def test_look_ahead(dtype):
    for seed, (lengths, capacity, multiple) in enumerate(SMALL_CASES):
        for order in (lengths, np.minimum(lengths, max(capacity // (5 * multiple), 1))):
            items = items_of(order, dtype)
            found = _C.look_ahead(items, capacity, multiple, seed)
            wanted = reference.look_ahead(pairs(items), capacity, multiple, seed)
            check_packing(found, wanted, dtype)


@pytest.mark.parametrize("dtype", ITEM_TYPES)
@pytest.mark.parametrize("num", [64, 65, 4096, 4097])
def test_look_ahead_over_the_edges_of_the_bit_set(num, dtype):
    rng = np.random.default_rng(num)
    items = items_of(np.exp(rng.normal(5, 1.5, num)).astype(np.int64).clip(1, 20000), dtype)
    for capacity in (20000, 262145, LARGEST):
        found = _C.look_ahead(items, capacity, 1, 7)
        check_packing(found, reference.look_ahead(pairs(items), capacity, 1, 7), dtype)


@pytest.mark.parametrize("dtype", ITEM_TYPES)
def test_iterative_sampling(dtype):
    for seed, (lengths, capacity, multiple) in enumerate(SMALL_CASES):
        for threshold, iterations in ((capacity, 4), (capacity * 9 // 10, 3), (0, 1), (1, 0)):
            items = items_of(lengths, dtype)
            wanted, *packing = reference.iterative_sampling(
                pairs(items),
                capacity,
                multiple,
                threshold=threshold,
                iterations=iterations,
                seed=seed,
            )
            found = _C.iterative_sampling(items, capacity, multiple, threshold, iterations, seed)
            check_packing(found, packing, dtype)
            assert pairs(items) == wanted


@pytest.mark.parametrize("dtype", ITEM_TYPES)
def test_greedy_fill(dtype):
    rng = np.random.default_rng(1)
    for turn in range(1200):
        num = int(rng.integers(0, 50)) if turn % 10 else int(rng.integers(200, 700))
        longest = int(rng.choice([1, 5, 300, 20000, LARGEST]))
        items = items_of(rng.integers(1, longest + 1, num), dtype)
        multiple = int(rng.choice([1, 1, 2, 16, 100]))
        spaces = rng.integers(0, min(longest * int(rng.integers(1, 20)), LARGEST) + 1, turn % 7)
        first_pack = int(rng.integers(0, 1000))
        wanted = reference.greedy_fill(pairs(items), multiple, spaces.tolist(), first_pack)
        pack_of = np.full(num, -1, dtype=dtype["id"])
        taken = _C.greedy_fill(items, multiple, spaces, first_pack, pack_of)
        assert pairs(items) == wanted[0]
        assert spaces.tolist() == wanted[1]
        assert pack_of.tolist() == wanted[2] + [-1] * (num - taken)


@pytest.mark.parametrize("dtype", ITEM_TYPES)
def test_greedy_fill_puts_a_clogged_window_aside(dtype):
    """Spaces below the longer items: these gather in the window until nothing in it fits."""
    rng = np.random.default_rng(2)
    for _ in range(12):
        num, num_packs = int(rng.integers(1200, 2500)), int(rng.integers(100, 200))
        items = items_of(rng.choice([10, 20, 90, 95, 100], num), dtype)
        mean = int(items["length"].mean())
        spaces = rng.integers(40, 89, num_packs)
        multiple = int(rng.choice([1, 1, 4]))
        wanted = reference.greedy_fill(pairs(items), multiple, spaces.tolist(), 0)
        pack_of = np.full(num, -1, dtype=dtype["id"])
        taken = _C.greedy_fill(items, multiple, spaces, 0, pack_of)
        assert pairs(items) == wanted[0]
        assert pack_of.tolist() == wanted[2] + [-1] * (num - taken)
        assert spaces.tolist() == wanted[1]
        # while short ones are left in number, no pack is left with room for several
        assert spaces.max() < mean or (items["length"][taken:] <= 20).mean() < 0.1


def bisecting_best_fit(items, capacity, in_streams):
    """reference.best_fit for many packs: packs are kept in order of (free tokens, -changed)."""

    shortest = min((length for _, length in items), default=0)

    def place(part, packs, num_packs):
        pack_of = []
        for turn, (_, length) in enumerate(part, start=num_packs):
            at = bisect_left(packs, (length, -num_packs - len(part)))
            if at < len(packs):
                space, _, pack = packs.pop(at)
            else:
                space, pack, num_packs = capacity, num_packs, num_packs + 1
            if space - length >= shortest:
                insort(packs, (space - length, -turn, pack))
            pack_of.append(pack)
        return pack_of, num_packs

    if not in_streams or len(items) < reference.MANY_ITEMS:
        return place(items, [], 0)
    stream = len(items) // 64 * 31
    all_packs, pack_of, num_packs = [], [], 0
    for first in (0, stream):
        own = []
        here, num_here = place(items[first : first + stream], own, 0)
        pack_of += [num_packs + pack for pack in here]
        all_packs += [(space, -num_packs - pack, num_packs + pack) for space, _, pack in own]
        num_packs += num_here
    rest, num_packs = place(items[2 * stream :], sorted(all_packs), num_packs)
    return pack_of + rest, num_packs


def test_bisecting_best_fit_is_best_fit():
    for lengths, capacity, multiple in SMALL_CASES:
        if multiple == 1:
            items = [(i, int(length)) for i, length in enumerate(lengths)]
            assert bisecting_best_fit(items, capacity, True) == reference.best_fit(items, capacity)


@pytest.mark.parametrize("dtype", ITEM_TYPES)
@pytest.mark.parametrize("num", [(1 << 16) - 1, 1 << 16, (1 << 16) + 31])
def test_best_fit_in_streams(num, dtype):
    rng = np.random.default_rng(num)
    for longest, capacity in ((900, 1000), (2**18, 262145), (2**29, LARGEST), (3, 10)):
        items = items_of(rng.integers(1, longest + 1, num), dtype)
        for in_streams in (True, False) if longest == 900 else (True,):
            found = _C.best_fit(items, capacity, 1, in_streams)
            check_packing(found, bisecting_best_fit(pairs(items), capacity, in_streams), dtype)
    few = items_of(rng.integers(1, 100, num), dtype)  # 25 packs: the reference looks at each
    found = _C.best_fit(few, 1 << 18, 2, True)
    check_packing(found, reference.best_fit(pairs(few), 1 << 18, 2, True), dtype)


@pytest.mark.parametrize("longest", [1 << 19, 1 << 20])
def test_best_fit_with_a_table_of_four_layers(longest):
    rng = np.random.default_rng(longest)
    num, capacity = 1 << 18, 1 << 20
    for in_streams in (False, True):
        items = items_of(rng.integers(1 << 17, longest + 1, num), _C.ITEM32)
        found = _C.best_fit(items, capacity, 1, in_streams)
        check_packing(found, bisecting_best_fit(pairs(items), capacity, in_streams), _C.ITEM32)


def test_first_fit_of_many_packs():
    rng = np.random.default_rng(4)
    for lengths in (rng.integers(1, 1001, 2500), np.full(3000, 501), np.full(3000, 500)):
        items = items_of(lengths, _C.ITEM32)
        check_packing(_C.first_fit(items, 1000), reference.first_fit(pairs(items), 1000), _C.ITEM32)


@pytest.mark.parametrize("dtype", ITEM_TYPES)
def test_packing_kernels_write_where_they_are_told(dtype):
    items = items_of([5, 6, 4, 9], dtype)
    for kernel, rest in (
        (_C.best_fit, (10, 1)),
        (_C.first_fit, (10, 1)),
        (_C.next_fit, (10, 1)),
        (_C.look_ahead, (10, 1, 3)),
        (_C.iterative_sampling, (10, 1, 9, 2, 3)),
    ):
        out = np.full(6, -1, dtype=dtype["id"])
        pack_of, num_packs = kernel(items.copy(), *rest, out=out[1:5])
        assert pack_of.tolist() == kernel(items.copy(), *rest)[0].tolist()
        assert out.tolist() == [-1, *pack_of, -1]
        assert num_packs == 3


lengths_and_capacity = st.integers(1, 200).flatmap(
    lambda capacity: st.tuples(
        st.lists(st.integers(1, capacity), max_size=80),
        st.just(capacity),
        st.integers(0, 2**64 - 1),
    )
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(lengths_and_capacity)
def test_invariants_of_packing(case):
    lengths, capacity, seed = case
    items = items_of(lengths, _C.ITEM32)
    longest_first = items_of(sorted(lengths, reverse=True), _C.ITEM32)
    packings = {
        "best_fit": (items, *_C.best_fit(items, capacity)),
        "first_fit": (items, *_C.first_fit(items, capacity)),
        "next_fit": (items, *_C.next_fit(items, capacity)),
        "best_fit_decreasing": (longest_first, *_C.best_fit(longest_first, capacity)),
        "first_fit_decreasing": (longest_first, *_C.first_fit(longest_first, capacity)),
        "look_ahead": (items, *_C.look_ahead(items, capacity, 1, seed)),
    }
    order = items.copy()
    packings["isf"] = (order, *_C.iterative_sampling(order, capacity, 1, capacity, 5, seed))
    assert sorted(order["id"].tolist()) == list(range(len(lengths)))
    least = -(-sum(lengths) // capacity)
    for name, (packed, pack_of, num_packs) in packings.items():
        loads = np.bincount(pack_of, weights=packed["length"], minlength=num_packs)
        assert len(loads) == num_packs, name
        assert (loads <= capacity).all(), name
        assert (loads > 0).all(), name
        assert num_packs >= least, name
        if name.startswith(("best_fit", "first_fit")):
            assert np.count_nonzero(2 * loads <= capacity) <= 1, name
        if name == "next_fit":
            assert (loads[:-1] + loads[1:] > capacity).all()
