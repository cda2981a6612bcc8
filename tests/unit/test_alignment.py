"""One function gives every multiple; the real cases that others got wrong."""

import math

import pytest

from megatron_hbp.alignment import Alignment, alignment, round_up


def test_defaults_need_no_multiple():
    assert alignment((1, 8)) == Alignment(1, (1, 1))


def test_budget_follows_sequence_parallelism_and_recipe():
    assert alignment((1,), tp_size=4).budget_multiple == 1
    assert alignment((1,), tp_size=4, sequence_parallel=True).budget_multiple == 4
    assert alignment((1,), fp8_recipe="mxfp8").budget_multiple == 32
    assert (
        alignment((1,), tp_size=4, sequence_parallel=True, fp8_recipe="delayed").budget_multiple
        == 64
    )


def test_unknown_names():
    with pytest.raises(ValueError, match="fp8 recipe 'fp4' is unknown; use one of"):
        alignment((1,), fp8_recipe="fp4")
    with pytest.raises(
        ValueError, match="CP layout 'ring' is unknown; use 'contiguous' or 'zigzag'"
    ):
        alignment((1,), cp_layout="ring")


@pytest.mark.parametrize(
    ("length", "multiple", "wanted"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8), (7, 1, 7)]
)
def test_round_up(length, multiple, wanted):
    assert round_up(length, multiple) == wanted


def test_br_b07_shorter_than_the_split():
    multiple = alignment((8,), cp_layout="zigzag", tp_size=2).document_multiples[0]
    padded = [round_up(length, multiple) for length in (1, 2, 5, 15, 16, 17)]
    assert multiple == 16
    assert padded == [16, 16, 16, 16, 16, 32]


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [("mxfp8", 32000), ("delayed", 31936), ("tensorwise", 31936), ("blockwise", 32256)],
)
def test_br_e01_recipe_multiple_per_shard(recipe, wanted):
    made = alignment((1,), tp_size=4, sequence_parallel=True, fp8_recipe=recipe)
    assert round_up(31936, made.budget_multiple) == wanted


@pytest.mark.parametrize(
    ("tp_size", "cp_size", "multiple"),
    [(1, 1, 1), (1, 2, 4), (2, 2, 4), (3, 2, 12), (4, 2, 8), (2, 4, 8), (4, 8, 32)],
)
def test_br_e03_smallest_safe_multiple(tp_size, cp_size, multiple):
    made = alignment((cp_size,), cp_layout="zigzag", tp_size=tp_size, sequence_parallel=True)
    assert made.document_multiples == (multiple,)
    if cp_size > 1:
        # two halves per rank, and each rank's tokens split over TP
        assert multiple % (2 * cp_size) == 0
        assert multiple // cp_size % tp_size == 0
        assert multiple == cp_size * math.lcm(2, tp_size)


def test_br_e03_without_cp_the_whole_row_is_split():
    # (TP 2, CP 1): documents need no padding, because S is a multiple of TP
    made = alignment((1,), cp_layout="zigzag", tp_size=2, sequence_parallel=True)
    assert made == Alignment(2, (1,))


def test_br_e05_two_recipes_never_look_alike():
    assert alignment((1,), fp8_recipe="delayed") != alignment((1,), fp8_recipe="mxfp8")


def test_br_i04_every_stage_has_the_same_padded_length():
    """TP 4 under sequence parallelism, CP 4: S is the same on all stages, a multiple of TP, and the
    pack of S x CP a multiple of 16; lengths between are refused, with the next one that will do.
    """
    wanted = alignment((4,), tp_size=4, sequence_parallel=True)
    accepted = [s for s in range(4481, 4497) if s % wanted.budget_multiple == 0]
    assert accepted == [4484, 4488, 4492, 4496]
    assert all(s * 4 % 16 == 0 for s in accepted)
    assert [round_up(s, wanted.budget_multiple) for s in range(4481, 4485)] == [4484] * 4
