"""The steps of one epoch."""

from itertools import pairwise

import numpy as np
import pytest

from megatron_hbp.config import PACKERS
from megatron_hbp.cost import DENSE_8B_H100
from megatron_hbp.level import Level
from megatron_hbp.packing import offsets_of
from megatron_hbp.planner import build_plan
from megatron_hbp.schedule import deal, plan_epoch, up_and_down
from tests.unit.epochs import make_shape, random_lens


def check_epoch(epoch, lens, shape, chosen=None):
    """What holds of every epoch; returns its packs as (level, ids), in training order."""
    wanted = np.flatnonzero(lens) if chosen is None else np.sort(chosen)
    np.testing.assert_array_equal(np.sort(epoch.sequence_ids), wanted)
    replicas = shape.replicas()[epoch.levels]
    assert len(epoch.pack_counts) == replicas.sum()  # whole micro-batches of one level each
    assert epoch.pack_counts.sum() == len(epoch.sequence_ids)
    assert len(epoch.levels) % (shape.num_microbatches or 1) == 0  # whole steps
    offsets = offsets_of(epoch.pack_counts)
    packs = [
        (int(level), epoch.sequence_ids[offsets[p] : offsets[p + 1]])
        for p, level in enumerate(np.repeat(epoch.levels, replicas))
    ]
    for level, ids in packs:
        multiple = shape.multiples[level]
        assert (-(-lens[ids] // multiple) * multiple).sum() <= shape.pack_lens[level]
    return packs


def epoch_of(lens, shape, packer="best_fit", *, curriculum_steps=0, seed=1, chosen=None):
    return plan_epoch(
        lens, shape, packer=packer, curriculum_steps=curriculum_steps, seed=seed, chosen=chosen
    )


SHAPES = [
    make_shape(),
    make_shape(cp_sizes=(1,), num_ranks=3, num_microbatches=5),
    make_shape(cp_sizes=(1, 2, 8), num_microbatches=1),
    make_shape(cp_sizes=(2, 4), num_microbatches=3),
    make_shape(multiples=np.array([1, 16])),
    make_shape(one_level=True),
    make_shape(num_stages=4, alike=True),
    make_shape(num_stages=4, num_virtual_stages=2, alike=True, max_mixing=1.3),
    make_shape(num_stages=4, alike=True, one_level=True),
    make_shape(num_microbatches=None),
]


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_sequence_is_in_one_pack_of_one_whole_step(shape, packer):
    rng = np.random.default_rng(1)
    for num in (1, 2, 40, 700):
        lens = random_lens(rng, num, int(shape.longest()))
        lens[0] = shape.longest()
        epoch, early = epoch_of(lens, shape, packer)
        check_epoch(epoch, lens, shape)
        assert early == 0
        if shape.one_level:
            steps = epoch.levels.reshape(-1, shape.num_microbatches)
            assert (np.ptp(steps, axis=1) == 0).all()
        same, _ = epoch_of(lens.astype(np.int32), shape, packer)
        for one, other in zip(vars(epoch).values(), vars(same).values(), strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_seed_changes_the_epoch():
    lens = random_lens(np.random.default_rng(1), 700, 1024)
    one, _ = epoch_of(lens, make_shape(), seed=1)
    other, _ = epoch_of(lens, make_shape(), seed=2)
    assert not np.array_equal(one.sequence_ids, other.sequence_ids)


def test_chosen_sequences_are_taken_as_often_as_they_are_named():
    lens = random_lens(np.random.default_rng(1), 300, 1024) + 1
    lens = np.minimum(lens, 1024)
    chosen = np.repeat(np.arange(300, dtype=np.int32), np.arange(300) % 4)
    epoch, _ = epoch_of(lens, make_shape(), chosen=chosen)
    check_epoch(epoch, lens, make_shape(), chosen)


@pytest.mark.parametrize("curriculum_steps", [0, 1, 5, 10_000])
@pytest.mark.parametrize("settings", [{}, {"one_level": True}, {"num_stages": 4, "alike": True}])
def test_a_curriculum_starts_with_cp_1(settings, curriculum_steps):
    shape = make_shape(**settings)
    lens = random_lens(np.random.default_rng(2), 3000, 1024)
    epoch, early = epoch_of(lens, shape, curriculum_steps=curriculum_steps)
    check_epoch(epoch, lens, shape)
    steps = epoch.levels.reshape(-1, shape.num_microbatches)
    possible = np.count_nonzero(epoch.levels == 0) // shape.num_microbatches
    assert early == min(curriculum_steps, possible)
    assert (steps[:early] == 0).all()
    if early == 5:  # the rest is not left without short ones
        assert (steps[early:] == 0).any()
        assert (steps[early : early + 20] == 1).any()


@pytest.mark.parametrize("settings", [{}, {"one_level": True}, {"num_stages": 4, "alike": True}])
def test_no_step_is_fillers_only(settings):
    shape = make_shape(**settings, num_microbatches=2)
    for num in (1, 3, 9, 33):
        for longest in (100, 1024):
            lens = random_lens(np.random.default_rng(num), num, longest)
            lens[0] = longest
            epoch, _ = epoch_of(lens, shape)
            replicas = shape.replicas()[epoch.levels].reshape(-1, 2).sum(axis=1)
            in_step = np.add.reduceat(epoch.pack_counts, offsets_of(replicas)[:-1])
            assert (in_step > 0).all()


@pytest.mark.parametrize("settings", [{}, {"one_level": True}, {"num_stages": 4, "alike": True}])
def test_levels_are_exhausted_together_and_lengths_do_not_drift(settings):
    shape = make_shape(num_microbatches=2, **settings)
    rng = np.random.default_rng(3)
    lens = np.concatenate([rng.integers(1, 257, 12000), rng.integers(257, 1025, 1500)])
    epoch, _ = epoch_of(lens, shape)
    packs = check_epoch(epoch, lens, shape)
    steps = epoch.levels.reshape(-1, 2)
    share = (steps == 1).mean()
    assert 0.2 < share < 0.9
    for tenth in np.array_split(steps, 10):
        assert abs((tenth == 1).mean() - share) < 0.1
    replicas = shape.replicas()[epoch.levels]
    mean_len = [
        np.mean([lens[ids].mean() for _, ids in packs[first:end] if len(ids)])
        for first, end in pairwise(offsets_of(replicas))
    ]
    place = np.arange(len(mean_len))
    assert abs(np.corrcoef(place, np.argsort(np.argsort(mean_len)))[0, 1]) < 0.1


def test_neighbouring_microbatches_balance():
    """Packs of one micro-batch cost about the same, whatever the corpus."""
    shape = make_shape(num_microbatches=2)
    lens = random_lens(np.random.default_rng(4), 20000, 1024)
    epoch, _ = epoch_of(lens, shape)
    packs = check_epoch(epoch, lens, shape)
    costs = np.array([(lens[ids] ** 2).sum() for _, ids in packs], dtype=float)
    lost = []
    starts = offsets_of(shape.replicas()[epoch.levels])
    for first, end in pairwise(starts):
        here = costs[first:end]
        lost.append(1 - here.mean() / here.max())
    assert np.mean(lost) < 0.01


def test_one_step_of_as_many_microbatches_as_it_takes():
    lens = random_lens(np.random.default_rng(5), 900, 1024)
    shape = make_shape(num_microbatches=None)
    epoch, early = epoch_of(lens, shape, curriculum_steps=3)
    check_epoch(epoch, lens, shape)
    assert early == 0
    assert (epoch.pack_counts > 0).all()


@pytest.mark.parametrize("num_hands", [1, 2, 7, 30])
@pytest.mark.parametrize("num_items", [0, 1, 6, 30, 31, 500])
def test_deal(num_items, num_hands):
    hands = deal(num_items, num_hands, 3)
    assert len(hands) == num_items
    assert ((hands >= 0) & (hands < num_hands)).all()
    counts = np.bincount(hands, minlength=num_hands)
    assert counts.max() - counts.min() <= 1
    rounds, rest = divmod(num_items, num_hands)
    before = rounds // 2 * num_hands
    for part in (hands[:before], hands[before + rest :]):  # the rest comes from the middle
        for first in range(0, len(part), num_hands):
            assert sorted(part[first : first + num_hands]) == list(range(num_hands))
    assert hands.tolist() == deal(num_items, num_hands, 3).tolist()
    if num_items == 500 and num_hands > 1:
        assert hands.tolist() != deal(num_items, num_hands, 4).tolist()
        assert hands[:num_hands].tolist() != hands[num_hands : 2 * num_hands].tolist() or (
            num_hands == 2
        )


def test_nothing_is_dealt_to_nobody():
    assert deal(0, 0, 3).tolist() == []


def test_up_and_down_keeps_each_step_and_puts_like_times_side_by_side():
    times = np.array([5.0, 1.0, 3.0, 3.0, 9.0, 2.0, 8.0])
    steps = np.array([[0, 1, 2, 4], [6, 5, 3, 1]])
    ordered = up_and_down(steps, times)
    assert np.array_equal(np.sort(ordered, axis=1), np.sort(steps, axis=1))
    assert times[ordered].tolist() == [[1.0, 5.0, 9.0, 3.0], [1.0, 3.0, 8.0, 2.0]]
    for row in times[ordered]:
        peak = int(np.argmax(row))
        assert (np.diff(row[: peak + 1]) >= 0).all()
        assert (np.diff(row[peak:]) <= 0).all()


def test_only_plans_for_pipelines_are_put_in_that_order():
    lens = np.random.default_rng(0).integers(10, 1000, 4000)
    for stages, ordered in ((1, False), (4, True)):
        plan = build_plan(lens, [Level(1024, 1)], 4, 8, stages, mixing="microbatch")
        packs = [plan.seq_lens[plan.pack(p)].astype(np.int64) for p in range(plan.num_packs)]
        seconds = DENSE_8B_H100.per_rank(
            np.array([len(n) for n in packs]),
            np.array([n.sum() for n in packs]),
            np.array([(n * n).sum() for n in packs]),
            np.ones(len(packs), dtype=np.int64),
        )
        times = seconds.reshape(-1, 8, 4).max(axis=2)
        turns = np.sign(np.round(np.diff(times, axis=1), 12))
        falls_then_rises = (turns[:, :-1] < 0) & (turns[:, 1:] > 0)
        assert falls_then_rises.any() != ordered
