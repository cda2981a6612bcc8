"""Axes, and numbers as the page says them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hbp.report.figure import Axis, short_count
from megatron_hbp.report.words import counted, gpu_time_text, method_name, percent

_NUMBERS = st.one_of(st.just(0.0), st.floats(1e-9, 1e12))


@given(_NUMBERS, _NUMBERS, st.integers(2, 8))
def test_an_axis_holds_its_values_between_few_short_ticks(one, other, count):
    low, high = min(one, other), max(one, other)
    axis = Axis.over(low, high, count)
    assert 2 <= len(axis.ticks) <= count + 3
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert -1e-3 <= axis.at(low) <= axis.at(high) <= 100 + 1e-3
    assert len(set(axis.texts)) == len(axis.texts)


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 1, ("0.0", "0.5", "1.0")),
        (0, 7.44, ("0", "2", "4", "6", "8")),
        (0, 0, ("0.0", "0.5", "1.0")),
        (0.3642, 1.0, ("0.2", "0.4", "0.6", "0.8", "1.0")),
        (3, 3, ("2.6", "2.8", "3.0", "3.2", "3.4")),
        (15000, 16384, ("15,000", "15,500", "16,000", "16,500")),
    ],
)
def test_ticks(low, high, texts):
    assert Axis.over(low, high).texts == texts


def test_an_axis_that_points_upwards_starts_at_the_bottom():
    texts = Axis.over(0, 8).texts_at(upwards=True)
    assert [(tick.at, tick.text) for tick in texts] == [
        (100, "0"), (75, "2"), (50, "4"), (25, "6"), (0, "8")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1"), (1000, "1,000"), (1024, "1K"), (131072, "128K"), (1 << 20, "1M"), (1536, "1,536")],
)
def test_token_counts_in_few_letters(number, text):
    assert short_count(number) == text


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (1234.5, "1,234 GPU-days"),
        (1.8477, "1.85 GPU-days"),
        (0.5, "12 GPU-hours"),
        (1.5 / 24 / 60, "1.5 GPU-minutes"),
        (1e-6, "0.0864 GPU-seconds"),
        (0.0, "0 GPU-seconds"),
    ],
)
def test_gpu_time_in_the_unit_that_suits(days, text):
    assert gpu_time_text(days).replace("\N{NO-BREAK SPACE}", " ") == text


def test_words():
    assert percent(0.2434) == "24.3\N{NO-BREAK SPACE}%"
    assert (counted(1, "step"), counted(1902, "step")) == ("1 step", "1,902 steps")
    assert counted(2, "micro-batch", "es") == "2 micro-batches"
    assert method_name("128:8 best_fit_decreasing") == "128:8 best fit decreasing"
    assert (method_name("HBP"), method_name("128:8 isf")) == ("this plan", "128:8 ISF")
