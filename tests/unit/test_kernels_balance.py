"""Kernels on whole packs and micro-batches equal tests/reference.py exactly."""

import numpy as np
import pytest

from megatron_hbp import _C
from tests import reference
from tests.unit.kernel_cases import FEW_ITEMS, ITEM_TYPES, LARGEST, items_of, pairs


def random_packing(rng, num, dtype, longest):
    """Items with ids in another order, in random packs, some of which are empty."""
    num_packs = int(rng.integers(1, 12))
    items = items_of(rng.integers(1, longest + 1, num), dtype, rng.permutation(num))
    return items, rng.integers(0, num_packs, num).astype(dtype["id"]), num_packs


@pytest.mark.parametrize("dtype", ITEM_TYPES)
@pytest.mark.parametrize("rounds_and_sizes", [(500, 60), (2, FEW_ITEMS + 9)])
def test_sums_of_packs(rounds_and_sizes, dtype):
    rounds, most = rounds_and_sizes
    rng = np.random.default_rng(2)
    for turn in range(rounds):
        num = int(rng.integers(0, most)) if rounds > 2 else most - turn
        items, pack_of, num_packs = random_packing(rng, num, dtype, (9, 70000)[turn % 2])
        listed, packs = pairs(items), pack_of.tolist()
        ids, offsets = _C.group(items, pack_of, num_packs)
        assert ids.dtype == dtype["id"]
        assert offsets.dtype == np.int64
        assert (ids.tolist(), offsets.tolist()) == reference.group(listed, packs, num_packs)
        sums = _C.sum_packs(items, pack_of, num_packs)
        assert sums.dtype == np.int64
        assert sums.T.tolist() == reference.sum_packs(listed, packs, num_packs)

        order = rng.permutation(num_packs)  # packs are laid down in another order
        starts = np.empty(num_packs, dtype=np.int64)
        starts[order] = np.cumsum([0, *np.diff(offsets)[order][:-1]])
        ids = _C.gather(items, pack_of, starts)
        assert ids.dtype == dtype["id"]
        assert ids.tolist() == reference.gather(listed, packs, starts.tolist())

        group_of = rng.integers(0, 5, num_packs).astype(np.int32)
        bins = np.unique(rng.integers(0, 70000, turn % 4))
        source_of = rng.integers(0, 3, max(num, 1)).astype(np.int32)
        for sources in ((), (source_of, 3)):
            tokens = _C.class_tokens(items, pack_of, group_of, 5, bins, *sources)
            assert tokens.dtype == np.int64
            assert tokens.tolist() == reference.class_tokens(
                listed,
                packs,
                group_of,
                5,
                bins.tolist(),
                source_of=sources[0] if sources else None,
                num_sources=3 if sources else 0,
            )

        chosen = rng.permutation(num_packs)[: rng.integers(0, num_packs + 1)]
        num_new, multiple = turn % 6, (1, 8)[turn % 2]
        for capacity in (1, 1 << 20):  # spread each pack alone, or all of them together
            wanted, wanted_sums = reference.spread_packs(
                listed,
                packs,
                capacity,
                multiple,
                chosen.tolist(),
                num_new=num_new,
                num_packs=num_packs,
            )
            spread = pack_of.copy()
            sums = _C.spread_packs(items, spread, capacity, multiple, chosen, num_new, num_packs)
            assert spread.tolist() == wanted
            assert sums.T.tolist() == wanted_sums
            assert sums.shape == (3, len(chosen) + num_new)


def test_squares_have_64_bits():
    items = items_of([LARGEST, LARGEST], _C.ITEM32)
    sums = _C.sum_packs(items, np.zeros(2, dtype=np.int32), 1)
    assert sums.T.tolist() == [[2, 2 * LARGEST, 2 * LARGEST**2]]


def test_replica_order():
    rng = np.random.default_rng(5)
    for turn in range(600):
        num_ranks = int(rng.choice([1, 2, 3, 8, 12]))
        divisors = [r for r in range(1, num_ranks + 1) if num_ranks % r == 0]
        starts = np.cumsum([0, *rng.choice(divisors, turn % 9)])
        costs = rng.choice([rng.random(starts[-1]), rng.integers(0, 4, starts[-1]) / 1.0])
        per_step = int(rng.integers(1, 5))
        order = _C.replica_order(costs, starts, per_step, num_ranks)
        assert order.dtype == np.int64
        assert order.tolist() == reference.replica_order(
            costs.tolist(), starts.tolist(), per_step, num_ranks
        )


@pytest.mark.parametrize("with_peaks", [False, True])
def test_mixed_steps(with_peaks):
    rng = np.random.default_rng(6)
    for turn in range(200):
        per_step = int(rng.integers(1, 6))
        num_steps = int(rng.integers(0, 8)) if turn % 20 else int(rng.integers(30, 40))
        num = num_steps * per_step
        most = int(rng.choice([1, 3, 10**6, 2**40]))
        deviations = rng.integers(-most, most + 1, (num, int(rng.integers(0, 5))))
        peaks = rng.integers(0, most * int(rng.choice([1, 4])) + 1, num) if with_peaks else None
        found = _C.mixed_steps(deviations, per_step, turn, peaks)
        assert found.dtype == np.int64
        wanted = reference.mixed_steps(deviations.tolist(), per_step, turn, peaks)
        assert found.tolist() == wanted
