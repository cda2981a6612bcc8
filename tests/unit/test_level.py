"""Levels: text form, validity, and what makes a set of them one plan."""

import pytest

from megatron_hbp.level import Level, check_levels


@pytest.mark.parametrize("text", ["16384:1", "131072:8", "16384:1:28", "131072:8:full"])
def test_text_round_trip(text):
    level = Level.parse(text)
    assert str(level) == text
    assert Level.parse(str(level)) == level


def test_fields():
    level = Level.parse(" 131072:8:full ")
    assert (level.pack_len, level.cp_size, level.recompute_layers) == (131072, 8, "full")
    assert level.tokens_per_rank == 16384
    assert Level.parse("8:2").recompute_layers == 0
    assert Level.parse("8:2:0") == Level(8, 2)


@pytest.mark.parametrize(
    "text", ["", "16384", "16384:", "16384:1:", "a:1", "16384:1:some", "1:1:1:1"]
)
def test_bad_text(text):
    with pytest.raises(ValueError, match=r"is not PACK_LEN:CP\[:RECOMPUTE\].*e\.g\. 16384:1:28"):
        Level.parse(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 1), "must be at least 1"),
        ((8, 0), "must be at least 1"),
        ((10, 4), "a multiple of 4; use 8"),
        ((3, 4), "a multiple of 4; use 4"),
        ((8, 1, -1), "recompute layers must be 0 or more, or 'full'"),
    ],
)
def test_impossible_levels(values, message):
    with pytest.raises(ValueError, match=message):
        Level(*values)


def test_levels_of_one_plan():
    check_levels((Level(16, 1), Level(128, 8)), 8)
    check_levels((Level(16, 2),), 2)


@pytest.mark.parametrize(
    ("levels", "num_ranks", "message"),
    [
        ((), 8, "no level given; name at least one, e.g. 16384:1"),
        ((Level(16, 1),), 0, "num_ranks is 0; it must be at least 1"),
        ((Level(128, 8), Level(16, 1)), 8, "do not ascend in pack_len; sort them"),
        ((Level(16, 1), Level(16, 1)), 8, "do not ascend in pack_len"),
        ((Level(16, 1), Level(64, 8)), 8, "16:1 puts 16: pack_len must be S x cp_size.*use 128:8"),
        ((Level(16, 1), Level(128, 8)), 12, r"8 does not divide 12 ranks; .*\[1, 2, 3, 4, 6, 12\]"),
    ],
)
def test_levels_that_do_not_go_together(levels, num_ranks, message):
    with pytest.raises(ValueError, match=message):
        check_levels(levels, num_ranks)
