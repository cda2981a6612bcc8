"""The paper's tables on a part of its samples: structure, chosen levels, and what must hold."""

import dataclasses

import numpy as np
import pytest

from examples import paper_predictions, paper_tables
from examples.paper_lengths import LONGEST, NUM_LONG, NUM_SAMPLES, paper_lengths
from examples.paper_times import TOKENS, published_profile
from megatron_hbp.histogram import LengthHistogram

NUM = 60_000


@pytest.fixture(scope="module")
def lengths():
    return paper_lengths(NUM)


@pytest.fixture(scope="module")
def found(lengths):
    return paper_tables.paper_tables(lengths)


def test_the_lengths_are_a_mixture_of_short_and_long(lengths):
    assert lengths.dtype == np.int64
    assert len(lengths) == NUM
    assert np.array_equal(lengths, paper_lengths(NUM))
    assert lengths.min() >= 8
    assert lengths.max() <= LONGEST
    long = lengths > 32768
    assert long.sum() == pytest.approx(0.8 * NUM * NUM_LONG / NUM_SAMPLES, rel=0.2)
    # what cannot train on one rank: the paper's communication ratio
    assert lengths[lengths > 16384].sum() / lengths.sum() == pytest.approx(0.173, abs=0.03)
    assert lengths[~long].mean() == pytest.approx(750, rel=0.05)
    with pytest.raises(ValueError, match="at least 2"):
        paper_lengths(1)


def test_the_levels_are_the_papers(found):
    levels = {level.pack_len: level.cp_size for level in found.selection.levels}
    assert levels == {16384: 1, 131072: 8}


def test_one_number_is_fitted_on_the_first_row(found):
    first = found.rows[0]
    assert first.days == pytest.approx(paper_tables.ISF_DAYS)
    for row in found.rows:
        assert row.days == pytest.approx(row.seconds * found.passes * 32 / 86400)


def test_every_published_row_is_there_once(found):
    assert [row.name for row in found.rows] == list(paper_tables.PUBLISHED)
    for row in found.rows:
        assert row.published == paper_tables.PUBLISHED[row.name]
        assert row.iterations > 0


def test_each_part_of_the_method_saves_time(found):
    days = {row.name: row.days for row in found.rows}
    assert days["+ balance batching"] < days["+ hierarchical levels"] < days["ISF 128K"]
    assert days["+ balance batching"] < days["manual levels 32K, 128K"] < days["ISF 128K"]
    assert days["random packing 128K"] > days["ISF 128K"]
    assert days["no packing 128K"] > 4 * days["ISF 128K"]
    ratios = {row.name: (row.abr, row.cr) for row in found.rows}
    assert ratios["+ balance batching"][0] < 0.05 < ratios["+ hierarchical levels"][0]
    assert ratios["+ hierarchical levels"][0] < ratios["ISF 128K"][0]
    assert ratios["ISF 128K"][1] == ratios["manual levels 32K, 128K"][1] == 1.0
    assert ratios["+ balance batching"][1] < 0.25


def test_a_missed_row_is_marked_and_explained(found):
    name = "+ balance batching"
    assert "missed: " + name not in _only(found, name, 1.0)
    text = _only(found, name, 1.2)
    assert "MISSED" in text
    assert f"missed: {name}: it rests on" in text
    assert "+20.0 %" in text


def _only(found, name, factor):
    """The table with one row off by a factor."""
    rows = tuple(
        dataclasses.replace(row, days=row.published.days * factor)
        for row in found.rows
        if row.name == name
    )
    return paper_tables.tables_text(dataclasses.replace(found, rows=rows))


def test_the_predictions_say_what_they_rest_on(lengths):
    profile = published_profile(LengthHistogram(lengths[lengths <= TOKENS]))
    text = paper_predictions.predictions_text(lengths, profile, 3.75)
    for part in ("our own optimum", "8 points, error", "a100-80gb", "on 256", "assumptions:"):
        assert part in text
    paper, ours, _ = paper_predictions.own_optimum(lengths, profile)
    assert ours < paper
    for device in paper_predictions.PUBLISHED_SPEEDUPS:
        assert 1.2 < paper_predictions.dense_speedup(lengths, device) < 1.8
    speedup, static, best = paper_predictions.deepseek(lengths)
    assert speedup > 1.2
    assert best.seconds < static.seconds


def test_the_script_prints_everything(capsys):
    paper_tables.main(["20000"])
    text = capsys.readouterr().out
    assert "--level 16384:1:28 --level 131072:8:28" in text
    assert text.count("fitted on ISF 128K") == 2
    for choice in paper_tables.CHOICES:
        assert text.count(choice) == 1


def test_the_choice_of_a_packer_is_told_with_what_the_papers_own_gives(lengths, found):
    isf = paper_tables.paper_tables(lengths, packer="isf")
    assert isf.rows[1].cr > found.rows[1].cr
    text = paper_tables.choices_text(isf)
    assert f"the paper's packer, they take {isf.rows[1].days:.2f} GPU days" in text
