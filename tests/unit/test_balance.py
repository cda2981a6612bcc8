"""Whole micro-batches: spreading packs over them, neighbours, replicas."""

import copy

import numpy as np
import pytest

from megatron_hbp.balance import neighbours, replica_order, whole_units
from megatron_hbp.cost import ATTENTION, PackCost
from megatron_hbp.packing import LevelPacks
from tests import reference
from tests.unit.epochs import make_shape, packs_of_levels, random_lens
from tests.unit.kernel_cases import pairs


def whole(packs, units, together, shape, cost=ATTENTION):
    return whole_units(
        copy.deepcopy(packs),
        pack_lens=shape.pack_lens,
        multiples=shape.multiples,
        replicas=np.asarray(units),
        microbatches_together=together,
        one_level=False,
        cost=cost,
    )


def members(packs: LevelPacks) -> list[frozenset]:
    """The items of each pack."""
    return [frozenset(np.flatnonzero(packs.pack_of == p)) for p in range(len(packs.levels))]


def check_sums(packs: LevelPacks) -> None:
    assert packs.sums.T.tolist() == reference.sum_packs(
        pairs(packs.items), packs.pack_of.tolist(), len(packs.levels)
    )


@pytest.mark.parametrize("together", [1, 2, 5])
@pytest.mark.parametrize("units", [(1, 1, 1), (8, 4, 1), (3, 7, 2), (40, 20, 5)])
def test_whole_units(units, together):
    shape = make_shape(cp_sizes=(1, 2, 8))
    rng = np.random.default_rng(sum(units) + together)
    for num in (1, 2, 5, 60, 400):
        lens = random_lens(rng, num, int(rng.choice([30, 256, 500, 2048])))
        lens[0] = 1
        before = packs_of_levels(lens, shape, units)
        packs = whole(before, units, together, shape)
        check_sums(packs)
        np.testing.assert_array_equal(packs.items, before.items)  # nothing lost or repeated
        assert len(packs.pack_of) == len(before.pack_of)

        have = np.bincount(before.levels, minlength=3)
        num_packs = np.bincount(packs.levels, minlength=3)
        assert (num_packs % units == 0).all()
        assert (num_packs >= have).all()
        assert ((num_packs > 0) == (have > 0)).all()  # no level is opened
        fewest = int((-(-have // units)).sum())
        assert (num_packs // units).sum() == -(-fewest // together) * together

        assert (packs.sums[1] <= shape.pack_lens[packs.levels]).all()
        assert (packs.items["length"] <= shape.limits()[packs.levels[packs.pack_of]]).all()
        moved = before.levels[before.pack_of] != packs.levels[packs.pack_of]
        # only a filler gets a sequence of another level, and only one
        assert (packs.sums[0, packs.pack_of[moved]] == 1).all()

        for level in set(packs.levels[packs.sums[0] == 0].tolist()):
            for pack in members(packs):  # nobody could have given a filler a sequence
                lengths = sorted(packs.items["length"][list(pack)])
                assert all(length > shape.limits()[level] for length in lengths[:-1])


def handmade(pack_lens: list[list[int]]) -> LevelPacks:
    """Packs of one level with these lengths."""
    lens = np.concatenate(pack_lens)
    packs = packs_of_levels(lens, make_shape(cp_sizes=(1,)), [1])
    packs.items["id"], packs.items["length"] = np.arange(len(lens)), lens
    packs.pack_of[:] = np.repeat(np.arange(len(pack_lens)), [len(pack) for pack in pack_lens])
    packs.levels = np.zeros(len(pack_lens), dtype=np.int64)
    packs.sums = np.array(
        reference.sum_packs(pairs(packs.items), packs.pack_of.tolist(), len(pack_lens))
    ).T.copy()
    return packs


def test_the_cheapest_pack_is_spread():
    shape = make_shape(cp_sizes=(1,))
    packs = handmade([[60, 20], [30, 30, 30]])
    by_attention = whole(packs, [1], 3, shape)
    assert by_attention.pack_of.tolist() == [0, 0, 1, 2, 1]
    by_tokens = whole(packs, [1], 3, shape, PackCost(linear=1.0))
    assert by_tokens.pack_of.tolist() == [0, 2, 1, 1, 1]


def test_whole_micro_batches_come_out_equally_full():
    # 5 packs of 8 for micro-batches of 4: 2 micro-batches, the cheapest packs in one of them
    packs = handmade([[64], *([8] * 8 for _ in range(4))])
    spread = whole(packs, [4], 1, make_shape(cp_sizes=(1,)))
    check_sums(spread)
    assert sorted(spread.sums[1].tolist()) == [32] * 3 + [40] * 4 + [64]
    one = whole(handmade([[8] * 20]), [8], 1, make_shape(cp_sizes=(1,)))
    assert sorted(one.sums[0].tolist()) == [2] * 4 + [3] * 4  # one pack becomes eight


def test_fillers_only_where_no_pack_has_two_sequences():
    shape = make_shape(cp_sizes=(1, 4))
    packs = whole(packs_of_levels(np.array([200, 200, 200]), shape, [8, 2]), [8, 2], 1, shape)
    assert np.count_nonzero(packs.sums[0] == 0) == 5
    packs = whole(packs_of_levels(np.array([9] * 8), shape, [8, 2]), [8, 2], 1, shape)
    assert packs.sums[0].tolist() == [1] * 8


def test_a_filler_gets_what_its_level_can_hold():
    shape = make_shape(cp_sizes=(1, 4))
    for lens, counts in (([700, 257, 200], [2, 1, 0]), ([700, 256, 200], [1, 1, 1])):
        packs = whole(packs_of_levels(np.array(lens), shape, [2, 1]), [2, 1], 1, shape)
        assert packs.levels.tolist() == [1, 0, 0]
        check_sums(packs)
        by_pack = np.bincount(packs.pack_of, minlength=3)
        assert sorted(by_pack.tolist(), reverse=True) == counts


def test_what_is_missing_goes_to_the_shortest_level_that_can_spare():
    shape = make_shape(cp_sizes=(1, 4))
    for lens, have, together, wanted in (
        ([300] * 3 + [250] * 5, [5, 1], 8, [5, 3]),  # the short ones have a pack each
        ([1000] * 2 + [250] * 5 + [25] * 4, [6, 2], 5, [8, 2]),
        ([300] * 3 + [25] * 40, [4, 1], 8, [7, 1]),  # both levels can spare
    ):
        before = packs_of_levels(np.array(lens), shape, [1, 1])
        assert np.bincount(before.levels).tolist() == have
        packs = whole(before, [1, 1], together, shape)
        assert np.bincount(packs.levels).tolist() == wanted
        check_sums(packs)


def test_neighbours():
    costs = np.array([5.0, 1.0, 5.0, 0.5, 1.0, 3.0])
    levels = np.array([1, 0, 1, 1, 0, 0])
    assert neighbours(costs, levels).tolist() == [1, 4, 5, 3, 0, 2]
    rng = np.random.default_rng(1)
    costs, levels = rng.integers(0, 9, 500) / 2, rng.integers(0, 4, 500)
    wanted = sorted(range(500), key=lambda p: (levels[p], costs[p], p))
    assert neighbours(costs, levels).tolist() == wanted


def test_replicas_even_out_a_step():
    rng = np.random.default_rng(2)
    num_ranks, per_step = 8, 4
    starts = np.cumsum([0, *rng.choice([8, 8, 2, 1], 400)])
    costs = rng.exponential(1.0, starts[-1])

    def busiest(order):
        """Mean over steps of the busiest rank's cost, by the mean rank's."""
        ratios = []
        for first in range(0, len(starts) - 1, per_step):
            busy = np.zeros(num_ranks)
            for k in range(first, first + per_step):
                here = costs[order[starts[k] : starts[k + 1]]]
                busy += np.repeat(here, num_ranks // len(here))
            ratios.append(busy.max() / busy.mean())
        return np.mean(ratios)

    order = replica_order(costs, starts, per_step, num_ranks)
    for k in range(len(starts) - 1):
        assert sorted(order[starts[k] : starts[k + 1]]) == list(range(starts[k], starts[k + 1]))
    assert busiest(order) - 1 < 0.7 * (busiest(np.arange(len(costs))) - 1)
