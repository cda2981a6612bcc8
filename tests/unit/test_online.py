"""Online scheduling: invariants, and batches worked out by hand."""

import numpy as np
import pytest

from megatron_hbp.cost import PackCost
from megatron_hbp.metrics import placement_metrics
from megatron_hbp.online import BARRIERS, schedule_online

TOKENS = PackCost(linear=1)


def _packs(placement):
    """(step, micro-batch, first rank, CP size, sorted lengths) of each pack."""
    steps = np.searchsorted(placement.step_offsets, placement.pack_microbatch, side="right") - 1
    ids = np.split(placement.sequence_ids, placement.pack_offsets[1:-1])
    return [
        (int(step), int(microbatch), int(rank), int(cp), sorted(placement.seq_lens[own].tolist()))
        for step, microbatch, rank, cp, own in zip(
            steps,
            placement.pack_microbatch,
            placement.pack_first_rank,
            placement.pack_cp,
            ids,
            strict=True,
        )
    ]


def _check(placement, seq_lens):
    """Each sequence once; aligned blocks of power-of-two size; at most S tokens on a rank."""
    assert sorted(placement.sequence_ids.tolist()) == list(range(len(seq_lens)))
    used = {}
    for _, microbatch, rank, cp, lens in _packs(placement):
        assert cp & (cp - 1) == 0
        assert rank % cp == 0
        assert rank + cp <= placement.num_ranks
        assert max(lens) <= placement.token_budget * cp
        assert cp == 1 or min(lens) > placement.token_budget * cp // 2  # the smallest CP size
        for member in range(rank, rank + cp):
            used[microbatch, member] = used.get((microbatch, member), 0) + sum(lens) / cp
    assert max(used.values()) <= placement.token_budget
    assert sorted({microbatch for microbatch, _ in used}) == list(range(placement.num_microbatches))
    assert (np.diff(placement.pack_microbatch) >= 0).all()
    assert (np.diff(placement.step_offsets) > 0).all()


@pytest.mark.parametrize("barrier", BARRIERS)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (6, 2), (8, 1), (16, 4)])
def test_invariants(barrier, num_ranks, num_microbatches):
    rng = np.random.default_rng(num_ranks)
    largest_cp = 1 << (num_ranks.bit_length() - 1)
    for seed in range(5):
        seq_lens = np.concatenate(
            [rng.integers(1, 100, 400), rng.integers(1, 64 * largest_cp + 1, 40).clip(1)]
        ).clip(1, 64 * largest_cp)
        placement = schedule_online(
            seq_lens, 64, num_ranks, num_microbatches, barrier=barrier, seed=seed
        )
        _check(placement, seq_lens)
        batch = np.bincount(placement.sequence_step(), seq_lens[placement.sequence_ids])
        assert batch.max() <= 64 * num_ranks * num_microbatches
        found = placement_metrics(placement)
        assert found["communication_ratio"] == found["communication_ratio_bound"]
        assert found["padding_ratio"] >= found["padding_ratio_bound"]


def test_a_batch_by_hand():
    """S = 8: 32 needs all ranks, 12 and 10 two each, the rest goes where there is least time."""
    seq_lens = np.array([32, 12, 10, 5, 3, 2], dtype=np.int32)
    placement = schedule_online(seq_lens, 8, 4, 2, cost=TOKENS)
    assert _packs(placement) == [
        (0, 0, 0, 4, [32]),
        # ranks 0 and 1 hold 6 tokens each of the 12, ranks 2 and 3 hold 5 each of the 10
        (0, 1, 0, 2, [12]),
        (0, 1, 2, 2, [10]),
        # 5 is too much for all; 3 goes to rank 2, then rank 3 has the least
        (0, 1, 2, 1, [3]),
        (0, 1, 3, 1, [2]),
        (0, 2, 0, 1, [5]),
    ]
    assert placement.step_offsets.tolist() == [0, 3]


def test_nothing_is_put_above_the_tallest_sequence():
    cost = PackCost(linear=1, quadratic=0.25)
    # 17 takes each rank (17 + 72.25) / 2 = 44.625; there is room for the 7 tokens, but not the time
    placement = schedule_online(np.array([17, 7]), 16, 2, 1, cost=cost)
    assert _packs(placement) == [(0, 0, 0, 2, [17]), (0, 1, 0, 1, [7])]
    # 10 on rank 0 takes 35, beside it 4 (8) and 6 (15)
    placement = schedule_online(np.array([10, 6, 4]), 16, 2, 1, cost=cost)
    assert _packs(placement) == [(0, 0, 0, 1, [10]), (0, 0, 1, 1, [4, 6])]
    # tiny sequences fill micro-batches of S tokens all the same
    placement = schedule_online(np.full(32, 1), 16, 2, 1, cost=TOKENS)
    assert placement.num_microbatches == 1


def test_without_lockstep_the_step_is_balanced():
    seq_lens = np.array([8, 5, 4, 3, 3, 1], dtype=np.int64)
    placement = schedule_online(seq_lens, 8, 2, 2, barrier="step", cost=TOKENS)
    # 8 + 3 + 1 and 5 + 4 + 3, cut where a micro-batch of 8 tokens is full
    assert _packs(placement) == [
        (0, 0, 0, 1, [8]),
        (0, 0, 1, 1, [5]),
        (0, 1, 0, 1, [1, 3]),
        (0, 1, 1, 1, [3, 4]),
    ]
    assert placement_metrics(placement, cost=TOKENS)["modelled_efficiency_step"] == 1


def test_batches_are_consecutive_in_the_order_of_the_seed():
    seq_lens = np.full(12, 4)
    first = schedule_online(seq_lens, 4, 2, 2, seed=0)
    order = np.random.Generator(np.random.PCG64(0)).permutation(12)
    for step in range(3):
        ids = first.sequence_ids[first.sequence_step() == step]
        assert sorted(ids.tolist()) == sorted(order[step * 4 : step * 4 + 4].tolist())
    again, other = (schedule_online(seq_lens, 4, 2, 2, seed=seed) for seed in (0, 1))
    assert again.sequence_ids.tolist() == first.sequence_ids.tolist()
    assert other.sequence_ids.tolist() != first.sequence_ids.tolist()


def test_no_sequences():
    placement = schedule_online(np.zeros(0, dtype=np.int32), 8, 4, 1)
    assert placement.num_steps == placement.num_microbatches == 0
    assert placement_metrics(placement)["modelled_efficiency"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": np.array([4, 65])}, r"sequence 1 has 65 tokens .* 1 to 64 \(S x the largest"),
        ({"seq_lens": np.array([0, 4])}, "sequence 0 has 0 tokens"),
        ({"seq_lens": np.array([1.0])}, r"seq_lens is float64 \[1\]; it must be"),
        ({"seq_lens": [1]}, "seq_lens is list"),
        ({"token_budget": 0}, "token_budget is 0; it must be at least 1"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"barrier": "none"}, "barrier 'none' is unknown; use one of microbatch, step"),
    ],
)
def test_wrong_use(change, message):
    given = {
        "seq_lens": np.array([4]),
        "token_budget": 16,
        "num_ranks": 6,
        "num_microbatches": 1,
    }
    with pytest.raises(ValueError, match=message):
        schedule_online(**(given | change))
