"""plan_batch: one global batch, as many micro-batches as it takes, the same on every rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hbp import Level, build_plan, plan_batch
from megatron_hbp.cost import PackCost

LEVELS = [Level(64, 1), Level(128, 2), Level(512, 8)]


def _rank_costs(plan, seq_lens):
    """[micro-batches, ranks]: squared lengths of each rank's pack, shared by its CP ranks."""
    return np.array(
        [
            [
                sum(int(seq_lens[i]) ** 2 for i in plan.pack(pack)) / level.cp_size
                for pack, level in (
                    (plan.pack_index(microbatch, rank)[0], plan.levels[index])
                    for rank in range(plan.num_ranks)
                )
            ]
            for microbatch, index in enumerate(plan.microbatch_level)
        ]
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 512), min_size=1, max_size=150), st.integers(1, 3), st.integers(0, 5)
)
def test_every_sequence_once_and_the_cap_strict(lens, domains, seed):
    lens = np.array(lens)
    plan = plan_batch(lens, LEVELS, 8 * domains, seed=seed)
    assert plan.audit(lens) == []
    assert plan.num_steps == 1
    assert plan.num_microbatches == len(plan.microbatch_level)
    np.testing.assert_array_equal(np.sort(plan.sequence_ids), np.arange(len(lens)))


def test_same_arguments_same_plan():
    lens = np.random.default_rng(0).integers(1, 512, 300)
    assert plan_batch(lens, LEVELS, 8).hash() == plan_batch(lens.astype(np.int32), LEVELS, 8).hash()
    assert plan_batch(lens, LEVELS, 8, seed=2).hash() != plan_batch(lens, LEVELS, 8).hash()


def test_as_few_micro_batches_as_the_tokens_allow():
    lens = np.random.default_rng(0).integers(1, 30, 4000)
    plan = plan_batch(lens, LEVELS[:1], 8)
    assert plan.num_microbatches == -(-lens.sum() // (8 * 64))


def test_ranks_do_equally_much():
    rng = np.random.default_rng(0)
    lens = np.clip(np.rint(rng.lognormal(np.log(20), 1.2, 4000)), 2, 512).astype(np.int64)
    costs = _rank_costs(plan_batch(lens, LEVELS, 16), lens)
    assert costs.sum(axis=0).max() < 1.05 * costs.sum(axis=0).mean()
    # and in each micro-batch: the slowest ranks add up to little more than the mean ones
    assert costs.max(axis=1).sum() < 1.15 * costs.mean(axis=1).sum()


def test_balance_follows_the_cost():
    rng = np.random.default_rng(0)
    lens = rng.integers(1, 21, 2000)
    fixed = plan_batch(lens, LEVELS[:1], 8, cost=PackCost(fixed=1.0))
    counts = np.diff(fixed.pack_offsets).reshape(-1, 8)
    assert (counts.max(axis=1) - counts.min(axis=1) <= 1).mean() > 0.9
    by_attention = plan_batch(lens, LEVELS[:1], 8)
    counts = np.diff(by_attention.pack_offsets).reshape(-1, 8)
    assert (counts.max(axis=1) - counts.min(axis=1) <= 1).mean() < 0.9


def test_more_ranks_than_sequences_give_flagged_fillers():
    plan = plan_batch(np.array([10, 20]), LEVELS[:1], 8)
    assert plan.audit(np.array([10, 20])) == []
    assert plan.num_microbatches == 1
    assert plan.counts()["filler_packs"] == 6


def test_br_a13_every_rank_gives_the_agreed_count():
    # what rank 0 has needs three packs, what rank 1 has needs one: both train three
    lens = np.array([40, 40, 40, 10, 10, 10])
    plan = plan_batch(lens, [Level(40, 1)], 2)
    assert plan.audit(lens) == []
    assert np.diff(plan.microbatch_offsets).tolist() == [2] * plan.num_microbatches
    assert plan.counts()["filler_packs"] == 0
    lens = np.array([40, 40, 40, 10])
    plan = plan_batch(lens, [Level(40, 1)], 2)
    assert plan.counts()["filler_packs"] == 0
    lens = np.array([40, 40, 40])
    plan = plan_batch(lens, [Level(40, 1)], 2)
    assert plan.counts()["filler_packs"] == 1  # an explicit one, with zero loss


def test_a_single_step_has_nothing_to_do_with_pipelines_or_epochs():
    lens = np.full(50, 10)
    for options in (
        {"num_stages": 2},
        {"epochs": 2},
        {"mixing": "step"},
        {"curriculum_steps": 1},
    ):
        with pytest.raises(ValueError, match=r"a single step .* has one stage, one epoch"):
            build_plan(lens, LEVELS, 8, None, **options)
    assert build_plan(lens, LEVELS, 8, None).hash() != build_plan(lens, LEVELS, 8).hash()


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="there is no sequence to plan"):
        plan_batch(np.array([], dtype=np.int64), LEVELS, 8)
    with pytest.raises(ValueError, match=r"seq_lens is float64 \[1\]"):
        plan_batch(np.array([np.nan]), LEVELS, 8)
    with pytest.raises(ValueError, match="sequence 1 has 513 tokens, but the longest level holds"):
        plan_batch(np.array([5, 513]), LEVELS, 8)
    assert plan_batch(np.array([5, 513]), LEVELS, 8, overlong="drop").dropped_ids.tolist() == [1]
