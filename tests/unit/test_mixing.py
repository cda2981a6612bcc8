"""Which micro-batches share a step."""

from itertools import pairwise

import numpy as np
import pytest

from megatron_hbp.metrics import LENGTH_BINS, pipeline_stretch
from megatron_hbp.mixing import MicrobatchKinds, group_into_steps, source_classes

NUM_CLASSES = len(LENGTH_BINS) + 1


def make_kinds(num: int, seed: int = 0, num_sources: int = 0) -> MicrobatchKinds:
    """Micro-batches of 32K tokens, each of sequences of about one length, as in plans."""
    rng = np.random.default_rng(seed)
    kinds = []
    for _ in range(num):
        typical = np.exp(rng.uniform(np.log(100), np.log(30000)))
        lens = (typical * rng.uniform(0.5, 2, 2000)).astype(np.int64).clip(1, 32768)
        kinds.append(lens[: max(1, np.searchsorted(np.cumsum(lens), 32768))])
    class_tokens = np.zeros((num, NUM_CLASSES + num_sources), dtype=np.int64)
    for row, lens in zip(class_tokens, kinds, strict=True):
        np.add.at(row, np.searchsorted(LENGTH_BINS, lens), lens)
        if num_sources:
            np.add.at(row, NUM_CLASSES + rng.integers(0, num_sources, len(lens)), lens)
    return MicrobatchKinds(
        levels=np.array([int(lens.max() > 8192) for lens in kinds]),
        class_tokens=class_tokens,
        num_length_classes=NUM_CLASSES,
        num_sequences=np.array([len(lens) for lens in kinds]),
        times=np.array([float(lens.sum() + (lens**2).sum() / 10000) for lens in kinds]),
        lens=np.concatenate(kinds).astype(np.int32),
    )


def grouped(kinds, part=None, **settings):
    defaults = {
        "num_microbatches": 4,
        "bubble": 7.0,
        "one_level": False,
        "alike": False,
        "max_mixing": 0.0,
        "seed": 5,
    }
    part = np.arange(len(kinds.levels)) if part is None else part
    return group_into_steps(kinds, part, **{**defaults, **settings})


def distance(kinds, steps):
    """Tokens by which steps differ from the mixture, summed over classes of length."""
    deviations = kinds.deviations(np.arange(len(kinds.levels)))[:, :NUM_CLASSES]
    return np.abs(deviations[steps].sum(axis=1)).sum()


def random_steps(kinds, num_microbatches=4):
    order = np.random.default_rng(9).permutation(len(kinds.levels))
    return order.reshape(-1, num_microbatches)


def step_time(kinds, steps, bubble=7.0):
    times = kinds.times[steps]
    return times.sum() + bubble * times.max(axis=1).sum()


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 10])
@pytest.mark.parametrize(
    "settings", [{}, {"alike": True}, {"alike": True, "max_mixing": 9.0}, {"bubble": 0.0}]
)
def test_every_microbatch_is_in_one_step(settings, num_microbatches):
    kinds = make_kinds(60)
    part = np.random.default_rng(1).permutation(60)[:40]
    for given in (np.arange(60), part, part[:0]):
        steps = grouped(kinds, given, num_microbatches=num_microbatches, **settings)
        assert steps.shape == (len(given) // num_microbatches, num_microbatches)
        assert sorted(steps.ravel()) == sorted(given)
        again = grouped(kinds, given, num_microbatches=num_microbatches, **settings)
        np.testing.assert_array_equal(steps, again)


@pytest.mark.parametrize("settings", [{}, {"alike": True}, {"alike": True, "max_mixing": 9.0}])
def test_one_level_means_one_level_a_step(settings):
    kinds = make_kinds(200)
    part = np.concatenate([np.flatnonzero(kinds.levels == level)[:40] for level in (0, 1)])
    steps = grouped(kinds, part, one_level=True, **settings)
    assert (np.ptp(kinds.levels[steps], axis=1) == 0).all()
    assert sorted(steps.ravel()) == sorted(part)
    assert np.ptp(kinds.levels[grouped(kinds, part, **settings)], axis=1).any()


def test_steps_look_like_the_corpus():
    kinds = make_kinds(400)
    mixed = grouped(kinds)
    assert distance(kinds, mixed) < 0.5 * distance(kinds, random_steps(kinds))


def test_sources_are_mixed_too():
    kinds = make_kinds(400, num_sources=2)
    source = np.arange(400) % 2  # each micro-batch is of one source
    kinds.class_tokens[:, NUM_CLASSES:] = kinds.tokens()[:, None] * np.eye(2, dtype=int)[source]
    steps = grouped(kinds)
    assert (source[steps].mean(axis=1) == 0.5).mean() > 0.9


def test_alike_steps_take_less_time_in_a_pipeline():
    kinds = make_kinds(400)
    mixed, alike = grouped(kinds), grouped(kinds, alike=True)
    assert step_time(kinds, alike) < 0.9 * step_time(kinds, mixed)
    assert pipeline_stretch(kinds.times[alike], 8) < pipeline_stretch(kinds.times[mixed], 8)
    # that costs mixing, but far less than steps of one kind each would
    by_time = np.argsort(kinds.times).reshape(-1, 4)
    assert distance(kinds, mixed) < distance(kinds, alike) <= distance(kinds, by_time)


def test_more_mixing_allowed_costs_no_more_time():
    kinds = make_kinds(400)
    bounds = (1.0, 1.25, 1.5, 2.0, 4.0)
    found = [grouped(kinds, alike=True, max_mixing=bound) for bound in bounds]
    times = [step_time(kinds, steps) for steps in found]
    for less, more in pairwise(times):
        assert more <= less * 1.01
    assert times[-1] < 0.9 * times[0]


def random_distance(kinds, num_steps):
    """distance() of steps whose sequences are drawn at random; such steps have a mixing of 1."""
    lens = kinds.lens[np.random.default_rng(8).permutation(len(kinds.lens))].astype(np.int64)
    step = np.cumsum(lens) * num_steps // (lens.sum() + 1)
    classes = np.searchsorted(LENGTH_BINS, lens)
    tokens = np.bincount(step * NUM_CLASSES + classes, lens, num_steps * NUM_CLASSES)
    tokens = tokens.reshape(num_steps, NUM_CLASSES)
    shares = tokens.sum(axis=0) / tokens.sum()
    return np.abs(tokens - tokens.sum(axis=1, keepdims=True) * shares).sum()


def test_max_mixing_is_a_bound():
    kinds = make_kinds(400, seed=3)
    at_random = random_distance(kinds, 100)
    best = distance(kinds, grouped(kinds)) / at_random
    for bound in (1.2 * best, 1.5 * best, 2.0 * best):
        found = distance(kinds, grouped(kinds, alike=True, max_mixing=bound))
        assert 0.7 * bound * at_random < found < 1.07 * bound * at_random


def test_a_bound_out_of_reach_is_an_error_that_names_one_in_reach():
    kinds = make_kinds(400, seed=3)
    with pytest.raises(ValueError, match=r"max_mixing is 1e-06, .* ratio of about \d") as caught:
        grouped(kinds, alike=True, max_mixing=1e-6)
    reachable = float(str(caught.value).split("about ")[1].split(";")[0])
    steps = grouped(kinds, alike=True, max_mixing=reachable + 0.01)
    assert sorted(steps.ravel()) == list(range(400))


def test_one_microbatch_a_step_is_left_as_it_is():
    kinds = make_kinds(10)
    assert grouped(kinds, num_microbatches=1).ravel().tolist() == list(range(10))


def test_deviations_sum_up_to_nothing():
    kinds = make_kinds(50)
    part = np.arange(0, 50, 2)
    deviations = kinds.deviations(part)
    assert deviations.dtype == np.int64
    assert abs(deviations.sum(axis=0)).max() <= len(part)  # rounding
    assert abs(deviations.sum(axis=1)).max() <= NUM_CLASSES
    shares = kinds.class_tokens[part].sum(axis=0) / kinds.tokens()[part].sum()
    wanted = kinds.class_tokens[part] - kinds.tokens()[part][:, None] * shares
    assert abs(deviations - wanted).max() <= 0.5


def test_source_classes():
    assert source_classes(np.array([5, 6]), None) == (None, 0)
    classes, num = source_classes(np.array([5, 6, 7]), np.array([30, 2, 30]))
    assert num == 2
    assert classes is not None
    assert classes.tolist() == [1, 0, 1]
    assert classes.dtype == np.int32
    sources = np.arange(200)
    lens = np.where(sources % 2 == 0, 1, 1000 + sources)
    classes, num = source_classes(lens, sources)
    assert num == 64
    assert classes is not None
    large = np.argsort(-lens)[:63]
    assert sorted(classes[large].tolist()) == list(range(63))
    assert set(np.delete(classes, large).tolist()) == {63}
