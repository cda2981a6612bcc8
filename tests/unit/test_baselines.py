"""The baselines: invariants, and placements worked out by hand."""

import numpy as np
import pytest

from megatron_hbp import Level, build_plan
from megatron_hbp.baselines import (
    SEQUENCE_ORDERS,
    ablation,
    next_fit,
    plan_placement,
    single_level,
    unbalanced_levels,
)
from megatron_hbp.config import PACKERS
from megatron_hbp.metrics import placement_metrics

LEVELS = (Level(64, 1), Level(128, 2), Level(512, 8))


def _lens(seed, most=512):
    rng = np.random.default_rng(seed)
    short, long = rng.integers(1, 60, 900), rng.integers(60, 513, 60)
    return rng.permutation(np.concatenate([short, long])).clip(1, most)


def _packs(placement):
    """(micro-batch, first rank, CP size, sequence ids) of each pack."""
    ids = np.split(placement.sequence_ids, placement.pack_offsets[1:-1])
    return [
        (int(microbatch), int(rank), int(cp), own.tolist())
        for microbatch, rank, cp, own in zip(
            placement.pack_microbatch,
            placement.pack_first_rank,
            placement.pack_cp,
            ids,
            strict=True,
        )
    ]


def _check(placement, seq_lens, num_microbatches, multiple=1):
    """Each sequence once; one level in a micro-batch; no two packs on a rank; whole steps."""
    assert sorted(placement.sequence_ids.tolist()) == list(range(len(seq_lens)))
    sizes, ranks = {}, {}
    for microbatch, rank, cp, ids in _packs(placement):
        assert sum(-(-int(seq_lens[i]) // multiple) * multiple for i in ids) <= (
            placement.token_budget * cp
        )
        assert sizes.setdefault(microbatch, cp) == cp
        assert rank % cp == 0
        assert rank + cp <= placement.num_ranks
        ranks.setdefault(microbatch, []).append(rank)
    assert all(sorted(set(own)) == own for own in ranks.values())
    assert (np.diff(placement.step_offsets) == num_microbatches).all()
    assert placement.num_microbatches - len(sizes) < num_microbatches  # the last step's rest


@pytest.mark.parametrize("packer", PACKERS)
def test_single_level_invariants(packer):
    seq_lens = _lens(0)
    for level, multiple in ((LEVELS[2], 1), (LEVELS[2], 16), (Level(512, 1), 8)):
        placement = single_level(seq_lens, level, 16, 4, packer=packer, seed=3, multiple=multiple)
        _check(placement, seq_lens, 4, multiple)
        found = placement_metrics(placement)
        expected = 0 if level.cp_size == 1 else 1
        assert found["communication_ratio"] == found["communication_ratio_bound"] == expected


@pytest.mark.parametrize("order", SEQUENCE_ORDERS)
def test_next_fit_invariants(order):
    seq_lens = _lens(1)
    _check(next_fit(seq_lens, LEVELS[2], 16, 4, order=order, multiple=16), seq_lens, 4, 16)


def test_next_fit_by_hand():
    seq_lens = np.array([3, 8, 4, 5, 2], dtype=np.int32)
    in_order = next_fit(seq_lens, Level(8, 2), 4, 2)
    assert _packs(in_order) == [
        (0, 0, 2, [0]),
        (0, 2, 2, [1]),
        (1, 0, 2, [2]),
        (1, 2, 2, [3, 4]),
    ]
    assert in_order.step_offsets.tolist() == [0, 2]
    ascending = next_fit(seq_lens, Level(8, 2), 4, 1, order="ascending")
    assert _packs(ascending) == [(0, 0, 2, [4, 0]), (0, 2, 2, [2]), (1, 0, 2, [3]), (1, 2, 2, [1])]
    assert ascending.step_offsets.tolist() == [0, 1, 2]
    shuffled = next_fit(seq_lens, Level(1024, 1), 1, order="random", seed=5)
    order = np.random.Generator(np.random.PCG64(5)).permutation(5)
    assert shuffled.sequence_ids.tolist() == order.tolist()


def test_decreasing_packs_come_longest_first():
    seq_lens = np.array([2, 7, 5, 3, 1])
    placement = single_level(seq_lens, Level(8, 1), 2, packer="first_fit_decreasing")
    packs = [(microbatch, rank, sorted(ids)) for microbatch, rank, _, ids in _packs(placement)]
    assert packs == [(0, 0, [1, 4]), (0, 1, [2, 3]), (1, 0, [0])]


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_unbalanced_levels_invariants(num_microbatches):
    for seed in range(4):
        seq_lens = _lens(seed)
        placement = unbalanced_levels(seq_lens, LEVELS, 16, num_microbatches, seed=seed)
        _check(placement, seq_lens, num_microbatches)
        cp_of = dict(
            zip(
                placement.sequence_ids.tolist(),
                np.repeat(placement.pack_cp, np.diff(placement.pack_offsets)).tolist(),
                strict=True,
            )
        )
        own = np.array([1, 2, 8])[np.searchsorted([64, 128, 512], seq_lens)]
        assert all(cp_of[i] >= own[i] for i in range(len(seq_lens)))
        found = placement_metrics(placement)
        assert found["communication_ratio_bound"] < found["communication_ratio"] < 1


def test_unbalanced_levels_with_multiples():
    seq_lens = _lens(5, most=480)
    placement = unbalanced_levels(seq_lens, LEVELS, 16, seed=1, multiples=(1, 12, 48))
    _check(placement, seq_lens, 1)
    for _, _, cp, ids in _packs(placement):
        multiple, capacity = {1: (1, 64), 2: (12, 128), 8: (48, 512)}[cp]
        assert sum(-(-int(seq_lens[i]) // multiple) * multiple for i in ids) <= capacity


def test_unbalanced_levels_by_hand():
    """The long pack is filled with the next-shorter level first: 10 + 4, and 2 of the 1s."""
    seq_lens = np.array([10, 4, 1, 1, 1, 1])
    levels = (Level(2, 1), Level(4, 2), Level(16, 8))
    placement = unbalanced_levels(seq_lens, levels, 8)
    packs = {cp: sorted(seq_lens[ids].tolist()) for _, _, cp, ids in _packs(placement)}
    assert packs == {8: [1, 1, 4, 10], 1: [1, 1]}
    assert placement.num_steps == 2


def test_a_plan_as_a_placement():
    seq_lens = _lens(2)
    plan = build_plan(seq_lens, LEVELS, 16, 2)
    placement = plan_placement(plan)
    assert sorted(placement.sequence_ids.tolist()) == list(range(len(seq_lens)))
    assert placement_metrics(placement) == plan.metrics()


def test_ablation():
    rows = ablation(_lens(3), LEVELS, 16, seed=7)
    assert list(rows) == ["512:8 isf", "levels", "levels + balance"]
    isf, levels, balanced = rows.values()
    assert isf["communication_ratio"] == isf["communication_ratio_bound"] == 1
    assert levels["communication_ratio_bound"] == balanced["communication_ratio_bound"] < 1
    balance = "attention_balance_ratio"
    assert balanced[balance] < min(isf[balance], levels[balance])
    # one replica is one iteration of the longest level: its ranks are alike
    assert isf[f"{balance}_replica"] == pytest.approx(isf[balance])
    assert 0 <= balanced[f"{balance}_replica"] < levels[f"{balance}_replica"]


def test_same_seed_same_placement():
    seq_lens = _lens(4)
    methods = (
        lambda seed: single_level(seq_lens, LEVELS[2], 16, seed=seed),
        lambda seed: next_fit(seq_lens, LEVELS[2], 16, order="random", seed=seed),
        lambda seed: unbalanced_levels(seq_lens, LEVELS, 16, seed=seed),
    )
    for method in methods:
        first, again, other = (method(seed).sequence_ids.tolist() for seed in (0, 0, 1))
        assert first == again != other


def test_no_sequences():
    empty = np.zeros(0, dtype=np.int64)
    for placement in (
        single_level(empty, LEVELS[2], 8, 2),
        next_fit(empty, LEVELS[2], 8, 2),
        unbalanced_levels(empty, LEVELS, 8, 2),
    ):
        assert placement.num_steps == 0
        assert placement_metrics(placement)["padding_ratio"] == 0


@pytest.mark.parametrize("method", [single_level, next_fit])
def test_wrong_use(method):
    level, seq_lens = Level(64, 4), np.array([60, 64])
    with pytest.raises(ValueError, match=r"sequence 1 has 65 tokens .* 1 to 64 \(the longest that"):
        method(np.array([64, 65]), level, 8)
    with pytest.raises(ValueError, match=r"sequence 1 has 64 tokens .* 1 to 60"):
        method(seq_lens, level, 8, multiple=12)
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        method(np.array([0]), level, 8)
    with pytest.raises(ValueError, match="seq_lens is float64"):
        method(np.array([1.0]), level, 8)
    with pytest.raises(ValueError, match="CP size 4 does not divide 6 ranks"):
        method(seq_lens, level, 6)
    with pytest.raises(ValueError, match="num_microbatches is 0"):
        method(seq_lens, level, 8, 0)


def test_unknown_names_and_levels():
    seq_lens = np.array([3])
    with pytest.raises(ValueError, match="order 'x' is unknown; use one of input, random"):
        next_fit(seq_lens, LEVELS[0], 8, order="x")
    with pytest.raises(ValueError, match="packer 'x' is unknown"):
        single_level(seq_lens, LEVELS[0], 8, packer="x")
    with pytest.raises(ValueError, match="do not ascend"):
        unbalanced_levels(seq_lens, LEVELS[::-1], 8)
    with pytest.raises(ValueError, match="sequence 0 has 600 tokens"):
        unbalanced_levels(np.array([600]), LEVELS, 8)
