"""How often an epoch takes each sequence."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hbp.weights import epoch_ids, repeats

LENS = np.full(400, 7)
SOURCES = np.arange(400) % 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.floats(0, 9), st.integers(0, 2**40), st.integers(1, 12))
def test_epochs_add_up_to_the_weight(weight, seed, num_epochs):
    total = np.zeros(400, dtype=np.int64)
    for epoch in range(num_epochs):
        total += repeats(LENS, SOURCES, [weight] * 4, seed, epoch)
        wanted = (epoch + 1) * weight
        assert total.min() >= np.floor(wanted - 1e-9)
        assert total.max() <= np.ceil(wanted + 1e-9)


def test_an_integer_weight_takes_every_sequence_that_often():
    for epoch in range(5):
        times = repeats(LENS, SOURCES, [0, 1, 2, 5], 3, epoch)
        assert times.dtype == np.int64
        np.testing.assert_array_equal(times, np.array([0, 1, 2, 5])[SOURCES])


def test_a_fraction_takes_that_share_of_its_source():
    lens = np.full(40_000, 7)
    sources = np.arange(40_000) % 2
    times = repeats(lens, sources, [0.3, 1.75], 3, 0)
    assert set(times[sources == 0].tolist()) == {0, 1}
    assert set(times[sources == 1].tolist()) == {1, 2}
    assert abs(times[sources == 0].mean() - 0.3) < 5 * 0.0033
    assert abs(times[sources == 1].mean() - 1.75) < 5 * 0.0031


def test_sequences_taken_in_one_epoch_wait_in_the_next():
    first, second = (repeats(LENS, SOURCES, [0.5] * 4, 3, epoch) for epoch in (0, 1))
    np.testing.assert_array_equal(first + second, np.ones(400))


def test_dropped_sequences_are_never_taken():
    lens = LENS.copy()
    lens[::3] = 0
    times = repeats(lens, SOURCES, [1.5] * 4, 3, 0)
    assert (times[::3] == 0).all()
    assert (times[1::3] >= 1).all()


def test_the_answer_depends_on_seed_epoch_and_place_only():
    times = repeats(LENS, SOURCES, [0.5] * 4, 3, 1)
    np.testing.assert_array_equal(times, repeats(LENS * 2, SOURCES, [0.5] * 4, 3, 1))
    np.testing.assert_array_equal(times[:100], repeats(LENS[:100], SOURCES[:100], [0.5] * 4, 3, 1))
    assert (times != repeats(LENS, SOURCES, [0.5] * 4, 4, 1)).any()
    assert (times != repeats(LENS, SOURCES, [0.5] * 4, 3, 2)).any()


def test_ids_of_an_epoch():
    ids = epoch_ids(LENS[:4], SOURCES[:4], [2, 0, 1, 3], 3, 0)
    assert ids.tolist() == [0, 0, 2, 3, 3, 3]
    assert ids.dtype == np.int32


def test_an_epoch_without_sequences_is_an_error():
    with pytest.raises(ValueError, match=r"epoch 2 takes no sequence .*\(0.0, 0.0\); use larger"):
        epoch_ids(LENS[:2], SOURCES[:2], [0.0, 0.0], 3, 2)
