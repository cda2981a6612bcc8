"""Each metric on examples worked out by hand."""

import json

import numpy as np
import pytest

from megatron_hbp import Level, build_plan, metrics
from megatron_hbp.cost import PackCost
from megatron_hbp.placement import Placement


def test_attention_balance_of_the_papers_example():
    costs = np.array([[4 * 1024**2, 2 * 2048**2]])
    assert metrics.attention_balance_ratio(costs) == 0.25


def test_balance_ratios_average_over_iterations():
    assert metrics.distribution_balance_ratio(np.array([[4, 4], [4, 2]])) == pytest.approx(0.125)
    assert metrics.distribution_balance_ratio(np.array([[0, 0], [4, 4]])) == 0
    assert metrics.distribution_balance_ratio(np.zeros((0, 4))) == 0


def test_padding_ratio_and_bound():
    assert metrics.padding_ratio(75, 100) == 0.25
    assert metrics.padding_ratio(0, 0) == 0
    # 101 tokens need 2 steps of 10 x 2 x 5 tokens
    bound = metrics.padding_ratio_bound(101, 10, num_ranks=2, num_microbatches=5, epochs=3)
    assert bound == pytest.approx(1 - 101 / 200)


def test_communication_ratio_and_bound():
    assert metrics.communication_ratio(np.array([30, 10]), np.array([1, 8])) == 0.25
    assert metrics.communication_ratio(np.array([], int), np.array([], int)) == 0
    lens, pack_lens = np.array([10, 20, 70]), np.array([20, 160])
    assert metrics.communication_ratio_bound(lens, pack_lens, np.array([1, 8])) == 0.7
    assert metrics.communication_ratio_bound(lens, pack_lens, np.array([2, 8])) == 1


def test_tokens_per_rank():
    assert metrics.tokens_per_rank(np.array([[10, 20], [30, 40]])) == 25
    assert metrics.tokens_per_rank(np.zeros((0, 2), int)) == 0


def test_sums_are_64_bit():
    long = np.full((1, 2), 2**31 - 1, dtype=np.int32)
    assert metrics.tokens_per_rank(long) == 2**31 - 1
    assert metrics.communication_ratio(long[0], np.array([1, 2])) == 0.5
    plan = build_plan(np.full(64, 2**20), [Level(2**20, 1)], 2)
    assert plan.metrics()["attention_balance_ratio"] == 0


def test_mixing_ratio_tells_sorted_from_shuffled():
    rng = np.random.default_rng(0)
    lens = rng.integers(1, 9000, 4000)
    classes = np.digitize(lens, metrics.LENGTH_BINS, True)
    steps = np.arange(4000) // 40
    shuffled = metrics.mixing_ratio(lens, steps, classes)
    order = np.argsort(lens)
    ordered = metrics.mixing_ratio(lens[order], steps, classes[order])
    assert 0.9 < shuffled < 1.1
    assert ordered > 3
    assert metrics.mixing_ratio(lens, steps, classes) == shuffled


def test_mixing_ratio_of_perfect_and_of_trivial_steps():
    lens, steps = np.tile([10, 300], 50), np.arange(100) // 2
    assert metrics.mixing_ratio(lens, steps, np.tile([0, 1], 50)) == pytest.approx(0)
    assert metrics.mixing_ratio(lens, np.zeros(100, int), np.tile([0, 1], 50)) == 1
    assert metrics.mixing_ratio(lens, steps, np.zeros(100, int)) == 1
    assert metrics.mixing_ratio(lens[:0], steps[:0], steps[:0]) == 1


def test_length_bins_end_with_their_bound():
    assert np.digitize([256, 257, 1024, 65536, 65537], metrics.LENGTH_BINS, True).tolist() == [
        0,
        1,
        1,
        6,
        7,
    ]


def test_pipeline_stretch():
    assert metrics.pipeline_stretch(np.array([[2.0, 2.0]]), 4) == 1
    assert metrics.pipeline_stretch(np.array([[1.0, 3.0]]), 1) == 1
    # (1 + 3 + 3 x 3) / (5 x 2)
    assert metrics.pipeline_stretch(np.array([[1.0, 3.0]]), 4) == pytest.approx(1.3)
    assert metrics.pipeline_stretch(np.zeros((0, 2)), 4) == 1


def test_modelled_efficiency():
    # 10 of work in 2 ranks x (4 + 3)
    times = np.array([[4.0, 2.0], [3.0, 2.0]])
    assert metrics.modelled_efficiency(times, 10.0) == pytest.approx(10 / 14)
    assert metrics.modelled_efficiency(np.zeros((0, 2)), 0.0) == 1


def test_plan_metrics_by_hand():
    # two ranks, S = 4: micro-batch 0 has packs [4] and [2, 1], micro-batch 1 has [6, 1] with CP 2
    found = metrics.plan_metrics(
        seq_lens=np.array([4, 2, 1, 6, 1], dtype=np.int32),
        sequence_ids=np.arange(5, dtype=np.int32),
        pack_offsets=np.array([0, 1, 3, 5]),
        microbatch_offsets=np.array([0, 2, 3]),
        microbatch_level=np.array([0, 1], dtype=np.int16),
        pack_lens=np.array([4, 8]),
        cp_sizes=np.array([1, 2]),
        num_ranks=2,
        num_microbatches=2,
        num_stages=1,
        source_ids=np.array([5, 5, 5, 9, 9]),
    )
    assert found["padding_ratio"] == found["padding_ratio_bound"] == pytest.approx(2 / 16)
    assert found["distribution_balance_ratio"] == pytest.approx((1 / 8 + 0) / 2)
    assert found["attention_balance_ratio"] == pytest.approx((11 / 32 + 0) / 2)
    # ranks have 16 + 18.5 and 5 + 18.5
    assert found["attention_balance_ratio_step"] == pytest.approx(11 / 2 / 34.5)
    assert found["communication_ratio"] == 0.5
    assert found["communication_ratio_bound"] == pytest.approx(6 / 14)
    assert found["tokens_per_rank"] == found["tokens_per_rank_bound"] == 3.5
    assert found["mixing_ratio"] == found["source_mixing_ratio"] == 1  # one step
    assert found["pipeline_stretch"] == 1
    assert json.loads(json.dumps(found)) == found
    assert all(f"{name}_bound" in found for name in found if not name.endswith("_bound"))


def test_no_metric_passes_its_bound():
    lens = np.random.default_rng(0).integers(1, 900, 700)
    for mixing in ("microbatch", "step"):
        found = build_plan(lens, [Level(256, 1), Level(1024, 4)], 8, 2, 2, mixing=mixing).metrics()
        for name in found:
            if name in ("tokens_per_rank", "modelled_efficiency", "modelled_efficiency_step"):
                assert found[name] <= found[f"{name}_bound"] + 1e-9
            elif not name.endswith("_bound"):
                assert found[name] >= found[f"{name}_bound"] - 1e-12


def _unlike_packs() -> Placement:
    """Four ranks, S = 8: CP sizes side by side, two packs on a rank, unlike steps.

    Micro-batch 0: [6, 4] with CP 2 on ranks 0 and 1, [4] with CP 2 on 2 and 3, [3] on 2, [6] on 3.
    Micro-batch 1: [8] on rank 1. Micro-batch 2: [16] with CP 4.
    """
    return Placement(
        seq_lens=np.array([6, 4, 4, 3, 6, 8, 16, 0], dtype=np.int32),
        sequence_ids=np.arange(7),
        pack_offsets=np.array([0, 2, 3, 4, 5, 6, 7]),
        pack_cp=np.array([2, 2, 1, 1, 1, 4]),
        pack_first_rank=np.array([0, 2, 2, 3, 1, 0]),
        pack_microbatch=np.array([0, 0, 0, 0, 1, 2]),
        step_offsets=np.array([0, 2, 3]),
        num_ranks=4,
        token_budget=8,
        cp1_pack_len=8,
    )


def test_metrics_of_unlike_packs_by_hand():
    cost = PackCost(linear=1, quadratic=0.5, communication=2)
    found = metrics.placement_metrics(_unlike_packs(), 3, source_ids=np.arange(8) % 2, cost=cost)
    assert found["padding_ratio"] == pytest.approx(1 - 47 / 96)
    assert found["padding_ratio_bound"] == pytest.approx(1 - 47 / 64)  # whole micro-batches
    # tokens of the ranks: 5 5 5 8, 0 8 0 0, 4 4 4 4
    assert found["distribution_balance_ratio"] == pytest.approx((9 / 32 + 24 / 32 + 0) / 3)
    assert found["distribution_balance_ratio_step"] == pytest.approx((21 / 52 + 0) / 2)
    # squares: 26 26 8+9 8+36, 0 64 0 0, 64 each
    assert found["attention_balance_ratio"] == pytest.approx((63 / 176 + 3 / 4 + 0) / 3)
    assert found["attention_balance_ratio_step"] == pytest.approx(((64 + 73 + 46) / 360 + 0) / 2)
    assert found["communication_ratio"] == pytest.approx(30 / 47)
    assert found["communication_ratio_bound"] == pytest.approx(16 / 47)
    assert found["tokens_per_rank"] == pytest.approx(47 / 12)
    assert found["tokens_per_rank_bound"] == pytest.approx(47 / 8)
    # seconds: 28 28 6+4+7.5 6+4+24 | 0 40 0 0 | (16 + 128 + 32) / 4 = 44 each
    work = 47 + (52 + 16 + 9 + 36 + 64 + 256) / 2
    assert found["modelled_efficiency"] == pytest.approx(work / (4 * (34 + 40 + 44)))
    assert found["modelled_efficiency_step"] == pytest.approx(work / (4 * (68 + 44)))
    # steps (34, 40) and (44): (74 + 2 x 40) / (4 x 37) and 1
    assert found["pipeline_stretch"] == pytest.approx((154 / 148 + 1) / 2)
    assert "source_mixing_ratio" in found
    assert json.loads(json.dumps(found)) == found


def test_a_plan_and_its_placement_have_the_same_metrics():
    lens = np.random.default_rng(0).integers(1, 900, 700)
    plan = build_plan(lens, [Level(256, 1), Level(1024, 4)], 8, 2, 2)
    packs, level = np.diff(plan.pack_offsets), plan.microbatch_level
    cp_sizes = np.array([1, 4])[plan.pack_level()]
    microbatch = np.repeat(np.arange(len(level)), np.diff(plan.microbatch_offsets))
    within = np.arange(len(packs)) - plan.microbatch_offsets[microbatch]
    placement = Placement(
        seq_lens=lens,
        sequence_ids=plan.sequence_ids,
        pack_offsets=plan.pack_offsets,
        pack_cp=cp_sizes,
        pack_first_rank=within * cp_sizes,
        pack_microbatch=microbatch,
        step_offsets=np.arange(plan.num_steps + 1) * 2,
        num_ranks=8,
        token_budget=256,
        cp1_pack_len=256,
    )
    assert metrics.placement_metrics(placement, 2) == plan.metrics()


def test_metrics_of_nothing_and_of_empty_steps():
    nothing = {
        "seq_lens": np.zeros(2, dtype=np.int64),
        "sequence_ids": np.zeros(0, dtype=np.int64),
        "pack_offsets": np.zeros(1, dtype=np.int64),
        "pack_cp": np.zeros(0, dtype=np.int64),
        "pack_first_rank": np.zeros(0, dtype=np.int64),
        "pack_microbatch": np.zeros(0, dtype=np.int64),
        "num_ranks": 4,
        "token_budget": 8,
        "cp1_pack_len": 8,
    }
    for steps in ([0], [0, 3, 4]):
        found = metrics.placement_metrics(Placement(**nothing, step_offsets=np.array(steps)), 4)
        assert found["attention_balance_ratio"] == found["distribution_balance_ratio_step"] == 0
        assert found["communication_ratio"] == found["tokens_per_rank"] == 0
        assert found["pipeline_stretch"] == found["modelled_efficiency"] == 1


def test_sums_past_64_bits_over_all_packs():
    long = 2**31 - 1
    placement = Placement(
        seq_lens=np.full(6, long, dtype=np.int32),
        sequence_ids=np.arange(6),
        pack_offsets=np.arange(7),
        pack_cp=np.ones(6, dtype=np.int64),
        pack_first_rank=np.array([0, 1, 0, 1, 0, 1]),
        pack_microbatch=np.array([0, 0, 1, 1, 2, 2]),
        step_offsets=np.array([0, 3]),
        num_ranks=2,
        token_budget=long,
        cp1_pack_len=long,
    )
    found = metrics.placement_metrics(placement, cost=PackCost(linear=1, quadratic=1))
    assert found["tokens_per_rank"] == long
    assert found["padding_ratio"] == found["attention_balance_ratio_step"] == 0
    assert found["modelled_efficiency"] == pytest.approx(1)
