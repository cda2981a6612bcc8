"""Sources: steps are mixed by them too, and each may have a weight."""

import itertools

import numpy as np
import pytest

from megatron_hbp import Level, build_plan
from megatron_hbp.plan import DROP_WEIGHTLESS

LEVELS = [Level(64, 1), Level(512, 8)]


def _corpus(num=30000, seed=0):
    """Lengths of three sources: short, middling, and long ones."""
    rng = np.random.default_rng(seed)
    source_ids = rng.integers(0, 3, num)
    mean = np.array([6.0, 20.0, 60.0])[source_ids]
    lens = np.clip(np.rint(rng.lognormal(np.log(mean), 0.6)), 2, 512).astype(np.int64)
    return lens, source_ids


def test_steps_hold_every_source():
    # packs of like cost gather sources of like lengths: without sources the mixture shifts
    lens, source_ids = _corpus()
    told = build_plan(lens, LEVELS, 16, 4, source_ids=source_ids)
    untold = build_plan(lens, LEVELS, 16, 4)
    assert told.audit(lens) == []
    assert told.metrics()["source_mixing_ratio"] < 1.25
    found = _source_distance(told, source_ids)
    assert found < 0.8 * _source_distance(untold, source_ids)


def _source_distance(plan, source_ids):
    """Mean total variation between the sources of a step and of all, by tokens."""
    ends = plan.pack_offsets[plan.microbatch_offsets[:: plan.num_microbatches]]
    shares = []
    for first, end in itertools.pairwise(ends):
        ids = plan.sequence_ids[first:end]
        tokens = np.bincount(source_ids[ids], weights=plan.seq_lens[ids], minlength=3)
        shares.append(tokens / tokens.sum())
    everything = np.bincount(source_ids, weights=plan.seq_lens)
    return np.abs(np.array(shares) - everything / everything.sum()).sum(axis=1).mean() / 2


def test_weights_repeat_and_leave_out():
    lens, source_ids = _corpus(3000)
    plan = build_plan(
        lens, LEVELS, 8, 2, epochs=4, source_ids=source_ids, source_weights=[2, 0.5, 0]
    )
    assert plan.audit(lens) == []
    times = np.bincount(plan.sequence_ids, minlength=len(lens))
    assert set(times[source_ids == 0]) == {8}
    assert set(times[source_ids == 1]) == {2}
    assert set(times[source_ids == 2]) == {0}
    assert (plan.dropped_reason == DROP_WEIGHTLESS).all()
    np.testing.assert_array_equal(plan.dropped_ids, np.flatnonzero(source_ids == 2))
    counts = plan.counts()
    assert counts["tokens_in"] == counts["tokens_kept"] + counts["tokens_dropped"]
    bounded = plan.metrics()
    assert bounded["padding_ratio"] >= bounded["padding_ratio_bound"]


def test_weighted_plan_comes_back_from_disk(tmp_path):
    lens, source_ids = _corpus(500)
    plan = build_plan(lens, LEVELS, 8, source_ids=source_ids, source_weights=[1, 1.5, 3])
    plan.save(tmp_path / "plan")
    again = type(plan).load(tmp_path / "plan")
    assert again.source_weights == (1.0, 1.5, 3.0)
    assert again.hash() == plan.hash()
    assert again.audit(lens) == []


def test_many_small_sources_are_one_class():
    rng = np.random.default_rng(0)
    lens = rng.integers(2, 60, 3000)
    source_ids = rng.integers(0, 500, 3000) * 7
    assert build_plan(lens, LEVELS, 8, 2, source_ids=source_ids).audit(lens) == []


def test_wrong_sources_and_weights_are_named():
    lens, source_ids = _corpus(20)
    cases = [
        ({"source_weights": [1]}, "source_weights need source_ids"),
        ({"source_ids": source_ids - 1}, r"source_ids of sequence \d+ is -1; it must be >= 0"),
        ({"source_ids": source_ids[:5]}, "source_ids has 5 entries for 20 sequences"),
        (
            {"source_ids": source_ids, "source_weights": [1, 2]},
            "source 2 has no weight: 2 source_weights are given",
        ),
        (
            {"source_ids": source_ids, "source_weights": [1, 2, -1]},
            "each must be a finite number of 0 or more",
        ),
        (
            {"source_ids": source_ids, "source_weights": [0, 0, 0]},
            r"all 20 sequences are dropped \(20 weight 0\)",
        ),
        (
            {"source_ids": source_ids, "source_weights": [1e-9, 1e-9, 1e-9]},
            "epoch 0 takes no sequence",
        ),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            build_plan(lens, LEVELS, 8, **options)
