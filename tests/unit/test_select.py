"""Levels chosen from lengths: every candidate accounted for, and choices that make sense."""

import dataclasses
import itertools

import numpy as np
import pytest

from megatron_hbp.candidates import token_budgets
from megatron_hbp.epoch_time import TERMS
from megatron_hbp.histogram import LengthHistogram
from megatron_hbp.level import Level
from megatron_hbp.models import find_model
from megatron_hbp.select import LEVEL_PRICE, Candidates, best_levels, predict
from tests.unit.selection_cases import CASES, H100, every_set, mixture, model, slower


def test_every_candidate_is_chosen_or_rejected_with_a_reason():
    lens, cost, budgets = CASES["dense"]
    cp_sizes = (1, 2, 4, 8, 16)
    found = best_levels(lens, cost, Candidates(token_budgets=budgets, cp_sizes=cp_sizes))
    assert all(one.reason for one in found.rejected)
    lost = {one.levels for one in found.rejected}
    for levels in every_set(lens, cost, budgets, cp_sizes):
        # a set is rejected with all that start alike, from the longest level down
        starts = {levels[index:] for index in range(len(levels))}
        assert levels == found.levels or starts & lost, levels
    predicted = [one.seconds for one in found.rejected if one.seconds is not None]
    assert predicted == sorted(predicted)
    assert found.best.seconds * (1 - 10 * LEVEL_PRICE) <= predicted[0]


def test_reasons_name_heads_memory_and_rarity():
    lens = mixture(0, 20000, 3, 60000)
    cost = model(num_ranks=64)
    found = best_levels(lens, cost, Candidates(token_budgets=(8192, 65536)))
    reasons = {one.subject: one.reason for one in found.rejected}
    assert "attention heads" in reasons["CP 64"]
    assert "memory" in reasons["65536:1:full"]
    assert any("packs of its own, whole" in reason for reason in reasons.values())
    assert any("no sequence needs" in reason for reason in reasons.values())
    assert any("most of it" in reason for reason in reasons.values())


def test_steps_that_hardly_fill_are_told():
    lens = mixture(0, 300, 1, 16000)
    cost = model(num_microbatches=16)
    found = best_levels(lens, cost, Candidates(token_budgets=(4096, 16384)))
    assert any("too few packs to fill a step" in one.reason for one in found.rejected)


def test_the_same_arguments_give_the_same_levels():
    lens, cost, _ = CASES["dense"]
    shuffled = np.random.default_rng(5).permutation(lens).astype(np.int32)
    assert best_levels(lens, cost) == best_levels(shuffled, cost)


def test_causes_add_up():
    lens, cost, _ = CASES["pipeline"]
    found = best_levels(lens, cost)
    assert found.static is not None
    for one in (found.best, found.static):
        assert tuple(one.terms) == TERMS
        assert sum(one.terms.values()) == pytest.approx(one.seconds)
        assert min(one.terms.values()) >= 0
    assert found.best.gpu_days == pytest.approx(found.best.seconds * 32 / 86400)


def test_a_step_of_given_tokens_keeps_its_size():
    lens, cost, _ = CASES["dense"]
    candidates = Candidates(token_budgets=(4096, 8192, 16384), tokens_per_step=16 * 16384)
    found = best_levels(lens, cost, candidates)
    assert found.best.tokens_per_step == 16 * 16384
    for one in found.rejected:
        if one.seconds is not None:
            layout = dataclasses.replace(
                cost.layout, num_microbatches=16384 // one.levels[0].tokens_per_rank
            )
            again = predict(one.levels, lens, dataclasses.replace(cost, layout=layout))
            assert again.seconds == pytest.approx(one.seconds)


NETWORKS = (8.0, 2.0, 1.0, 0.5, 0.2, 0.05)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", ["llama-3.1-8b", "deepseek-v2-lite"])
def test_a_slower_network_never_raises_communication(seed, shape):
    """What the chosen levels send, timed on one and the same network."""
    lens = mixture(seed, 3000 * (1 + seed), 20 * (1 + seed), 20000 * (1 + seed))
    ranks = (8, 16, 32)[seed % 3]
    sent = []
    for factor in NETWORKS:
        experts = 8 if find_model(shape).num_experts else 1
        cost = model(slower(H100, factor), find_model(shape), num_ranks=ranks, ep_size=experts)
        levels = best_levels(lens, cost).levels
        price = 1 + LEVEL_PRICE * (len(levels) - 1)
        at_1, at_half = (
            predict(levels, lens, dataclasses.replace(cost, device=slower(H100, share))).seconds
            for share in (1.0, 0.5)
        )
        sent.append((at_half - at_1) * price)
    for faster_network, slower_network in itertools.pairwise(sent):
        assert slower_network <= faster_network * (1 + 1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_a_slower_network_never_raises_the_share_of_cp(seed):
    """The share of tokens that pay for CP, at one token budget."""
    lens = mixture(seed, 20000, 100, 65536)
    shares = [
        best_levels(
            lens, model(slower(H100, factor)), Candidates(token_budgets=(8192,))
        ).best.communication_ratio
        for factor in NETWORKS
    ]
    assert shares == sorted(shares, reverse=True)


def test_more_memory_never_raises_recompute_nor_time():
    lens = mixture(0, 20000, 60, 65536)
    seconds, recompute = [], []
    for gib in (70, 80, 90, 120, 200, 400):
        device = dataclasses.replace(H100, memory_bytes=gib * 2**30)
        fixed = best_levels(
            lens, model(device), Candidates(token_budgets=(12288,), cp_sizes=(1, 8))
        )
        assert [level.cp_size for level in fixed.levels] == [1, 8]
        recompute.append([level.recompute_layers for level in fixed.levels])
        # the same grid for all, so that more memory only adds to it
        grid = Candidates(token_budgets=(4096, 6144, 8192, 12288, 16384, 24576, 32768))
        seconds.append(best_levels(lens, model(device), grid).best.seconds)
    for layers in zip(*recompute, strict=True):
        assert list(layers) == sorted(layers, reverse=True)
    assert recompute[0] != recompute[-1]
    assert all(
        after <= before * (1 + 6 * LEVEL_PRICE) for before, after in itertools.pairwise(seconds)
    )
    assert seconds[-1] < seconds[0]


def test_a_sequence_over_every_candidate_is_an_error_with_what_would_do():
    lens = np.array([500] * 100 + [100_001], dtype=np.int64)
    narrow = Candidates(token_budgets=(4096,), cp_sizes=(1, 2, 4, 8), budget_multiple=16)
    with pytest.raises(ValueError, match=r"has 100001 tokens.* S that would do") as error:
        best_levels(lens, model(), narrow)
    smallest = int(str(error.value).split("smallest S that would do is ")[1].split(";")[0])
    assert smallest == 12512
    wide = dataclasses.replace(narrow, token_budgets=(smallest,))
    assert best_levels(lens, model(), wide).levels[-1].pack_len == 100_096
    with pytest.raises(ValueError, match=r"no multiple of 16.*use 12512"):
        Candidates(token_budgets=(12501,), budget_multiple=16)


def test_memory_that_nothing_fits_is_an_error_with_what_is_needed():
    tiny = dataclasses.replace(H100, memory_bytes=40 * 2**30)
    with pytest.raises(ValueError, match=r"no candidate fits in memory: .* GiB .*has 40.0 GiB"):
        best_levels(mixture(0, 100, 3, 30000), model(tiny))
    with pytest.raises(ValueError, match=r"no candidate fits in memory: 262144 tokens per rank"):
        best_levels(mixture(0, 100, 3, 30000), model(), Candidates(token_budgets=(262144,)))


def test_a_budget_that_fits_only_where_the_longest_does_not_is_an_error():
    """S 4096 fits but holds 32768 at most; S 65536 would hold it and does not fit."""
    lens = np.array([500] * 100 + [40_000], dtype=np.int64)
    with pytest.raises(ValueError, match="no candidate fits in memory"):
        best_levels(lens, model(), Candidates(token_budgets=(4096, 65536), cp_sizes=(1, 2, 4, 8)))


def test_cp_sizes_that_the_heads_refuse_are_an_error():
    with pytest.raises(ValueError, match=r"no CP size is left: .*CP size 3 does not divide"):
        best_levels(mixture(0, 100, 3, 9000), model(), Candidates(cp_sizes=(3,)))
    with pytest.raises(ValueError, match=r"cp_sizes is .*name at least one"):
        Candidates(cp_sizes=())
    with pytest.raises(ValueError, match="per_doubling is 0"):
        Candidates(per_doubling=0)


def test_lengths_that_are_none_are_an_error():
    for lens in (np.array([], dtype=np.int64), np.zeros(5, dtype=np.int32)):
        with pytest.raises(ValueError, match="sequences has a token"):
            best_levels(lens, model())
    with pytest.raises(ValueError, match="length of -3"):
        best_levels(np.array([5, -3]), model())
    with pytest.raises(ValueError, match="int32 or int64"):
        best_levels(np.array([1.5, 2.0]), model())


def test_levels_that_do_not_hold_the_longest_are_not_predicted():
    with pytest.raises(ValueError, match="longest sequence has 9000 tokens, level 8192:1"):
        predict([Level(8192, 1)], np.array([9000]), model())
    with pytest.raises(ValueError, match="one S"):
        predict([Level(8192, 1), Level(32768, 2)], np.array([9000]), model())


def test_sequences_of_one_token_and_of_one_length():
    for lens in (np.ones(3, dtype=np.int64), np.full(64, 40_000)):
        found = best_levels(lens, model())
        assert len(found.levels) == 1
        assert found.levels[0].pack_len >= lens.max()
        assert found.best.num_steps >= 1


@pytest.mark.parametrize("longest", [1, 63, 1000, 9001, 16384, 40_961])
def test_the_grid_reaches_one_rank_for_each_cp_size(longest):
    """Every CP size has a budget that holds the longest sequence and wastes less than 1/32."""
    cost = model(dataclasses.replace(H100, memory_bytes=10**15))
    cp_sizes = (1, 2, 4, 8, 16)
    budgets = token_budgets(LengthHistogram(np.array([longest])), cost, Candidates(), cp_sizes)
    assert list(budgets) == sorted(set(budgets))
    for size in cp_sizes:
        needed = -(-longest // size)
        assert any(needed <= budget <= needed * 33 / 32 + 1 for budget in budgets)
