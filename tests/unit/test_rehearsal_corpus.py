"""Synthetic corpora: a recipe's lengths on a rehearsal's levels."""

import numpy as np
import pytest

from megatron_hbp.arrays import load_array
from megatron_hbp.level import Level
from megatron_hbp.planner import build_plan
from megatron_hbp.rehearsal.corpus import (
    drawn_lengths,
    made_up_lengths,
    scaled_lengths,
    write_corpora,
)
from megatron_hbp.rehearsal.lengths import read_lengths

BEFORE = [Level(4096, 1), Level(8192, 2), Level(32768, 8)]
AFTER = [Level(128, 1), Level(256, 2), Level(512, 4)]


def level_of(lengths, levels):
    return np.searchsorted([level.pack_len for level in levels], lengths)


def test_every_length_keeps_its_level_and_its_order():
    lengths = np.arange(1, 40000, 7, dtype=np.int32)
    scaled = scaled_lengths(lengths, BEFORE, AFTER)
    assert (level_of(lengths, BEFORE) == level_of(scaled, AFTER)).all()
    assert (np.diff(scaled) >= 0).all()
    assert scaled.min() == 2
    ends = scaled_lengths(np.array([4096, 8192, 32768]), BEFORE, AFTER)
    assert ends.tolist() == [128, 256, 512]
    assert scaled[-1] > 512


@pytest.mark.parametrize("levels", [AFTER, AFTER[:2], AFTER[:1]])
def test_each_level_has_its_share_and_never_too_little(levels):
    """Nearly all lengths are short: the longer levels are there all the same."""
    lengths = np.array([5] * 10_000 + [200] + [300], dtype=np.int64)
    tokens, per_microbatch = 16_000, 512
    drawn = drawn_lengths(lengths, levels, num_tokens=tokens, per_microbatch=per_microbatch, seed=1)
    if levels == AFTER:
        assert abs(int(drawn.sum()) - tokens) < 0.05 * tokens
    places = level_of(drawn, levels)
    for place in range(len(levels)):
        assert drawn[places == place].sum() > per_microbatch
    again = drawn_lengths(lengths, levels, num_tokens=tokens, per_microbatch=per_microbatch, seed=1)
    assert (drawn == again).all()


def test_a_level_without_lengths_gets_some():
    drawn = drawn_lengths(np.full(100, 10), AFTER, num_tokens=8000, per_microbatch=512, seed=1)
    assert set(level_of(drawn, AFTER)) == {0, 1, 2}


def test_made_up_lengths_need_every_level():
    lengths = made_up_lengths(AFTER)
    assert set(level_of(lengths, AFTER)) == {0, 1, 2}
    assert lengths.max() == 512


@pytest.mark.parametrize("count", [1, 2])
def test_corpora_make_a_plan_of_about_so_many_steps(tmp_path, count):
    ranks, microbatches, steps = 4, 4, 4
    folders = [tmp_path / f"corpus-{place}" for place in range(count)]
    options = {
        "num_tokens": steps * ranks * microbatches * 128,
        "per_microbatch": ranks * 128,
        "seed": 1,
    }
    corpora = write_corpora(folders, made_up_lengths(AFTER), AFTER, **options)
    lengths = np.concatenate([corpus.seq_lens for corpus in corpora])
    plan = build_plan(lengths, AFTER, ranks, num_microbatches=microbatches)
    assert plan.num_steps in (steps, steps + 1)
    assert set(plan.microbatch_level.tolist()) == {0, 1, 2}
    again = write_corpora(
        [tmp_path / f"again-{place}" for place in range(count)],
        made_up_lengths(AFTER),
        AFTER,
        **options,
    )
    assert [corpus.hash for corpus in corpora] == [corpus.hash for corpus in again]
    assert len({corpus.hash for corpus in corpora}) == count


def test_lengths_come_from_tables_and_arrays(tmp_path):
    (tmp_path / "a.csv").write_text("length,count\n3,2\n9,1\n")
    np.save(tmp_path / "a.npy", np.array([3, 3, 9], dtype=np.int32))
    assert read_lengths(tmp_path / "a.csv").tolist() == [3, 3, 9]
    assert read_lengths(tmp_path / "a.npy").tolist() == [3, 3, 9]
    assert load_array(tmp_path / "a.npy").dtype == np.int32
    with pytest.raises(ValueError, match=r"lengths .*none\.npy cannot be read"):
        read_lengths(tmp_path / "none.npy")
