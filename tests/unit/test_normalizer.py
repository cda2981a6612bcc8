"""Each normalizer against its formula, through the weights that the data sets hand to the loss."""

import itertools

import numpy as np
import pytest

from megatron_hbp.config import LOSS_NORMALIZERS
from megatron_hbp.dataset import HbpDataset
from megatron_hbp.level import Level
from megatron_hbp.normalizer import sequence_weights, step_totals
from megatron_hbp.planner import build_plan
from tests.distributed.handmade import plan_over_slots
from tests.unit.memory_corpus import MemoryCorpus, random_memory_corpus


def _token_loss(sequence, position):
    """Any number that tells tokens apart."""
    return 1.0 + ((7 * sequence + 3 * position) % 11) / 10


def _step_loss(plan, corpus, normalizer, step, loss=_token_loss):
    """What the host computes: sum of weight x loss over all ranks / trained tokens of the step."""
    total, trained = 0.0, 0
    for rank in range(plan.num_ranks):
        dataset = HbpDataset(plan, corpus, rank, normalizer=normalizer)
        for microbatch in range(step * plan.num_microbatches, (step + 1) * plan.num_microbatches):
            item = dataset[microbatch]
            pack, cp_rank = plan.pack_index(microbatch, rank)
            losses = np.zeros(plan.levels[item["level"]].pack_len)
            for start, i in zip(item["cu_seqlens"].tolist(), plan.pack(pack), strict=False):
                for position in range(int(plan.seq_lens[i])):
                    losses[start + position] = loss(int(i), position)
            local = losses[cp_rank * plan.token_budget : (cp_rank + 1) * plan.token_budget]
            total += float(local @ item["loss_weights"].numpy().astype(np.float64))
            trained += int(item["num_trained"])
    return total / trained


def _formula(plan, corpus, normalizer, step):
    """The docstring's formulas, token by token."""
    packs = []  # (CP size, per sequence its trained tokens' losses)
    for microbatch in range(step * plan.num_microbatches, (step + 1) * plan.num_microbatches):
        cp_size = plan.levels[plan.microbatch_level[microbatch]].cp_size
        first, end = plan.microbatch_offsets[microbatch : microbatch + 2]
        for pack in range(first, end):
            sequences = [
                [_token_loss(int(i), p - 1) for p in np.flatnonzero(corpus.mask(i)) if p > 0]
                for i in plan.pack(pack)
            ]
            packs.append((cp_size, sequences))
    sequences = [losses for _, pack in packs for losses in pack]
    tokens = list(itertools.chain.from_iterable(sequences))
    if normalizer == "ave-token":
        return np.mean(tokens)
    if normalizer == "sum":
        return np.sum(tokens)
    if normalizer == "sample-mean":
        return np.mean([np.mean(losses) for losses in sequences])
    slots = []
    for cp_size, pack in packs:
        if pack:
            slots += [np.mean(list(itertools.chain.from_iterable(pack)))] * cp_size
    return np.mean(slots)


@pytest.mark.parametrize("normalizer", LOSS_NORMALIZERS)
def test_each_normalizer_equals_its_formula(normalizer):
    """Uneven counts, CP 1, 2 and 4 in one step of four micro-batches, fillers among them."""
    corpus = random_memory_corpus([*range(3, 64, 5), 120, 100, 90, 12, 7])
    plan = build_plan(
        corpus.seq_lens,
        (Level(32, 1), Level(64, 2), Level(128, 4)),
        4,
        num_microbatches=4,
        first_trained=corpus.first_trained,
    )
    assert len(set(plan.microbatch_level.tolist())) == 3
    for step in range(plan.num_steps):
        measured = _step_loss(plan, corpus, normalizer, step)
        assert measured == pytest.approx(_formula(plan, corpus, normalizer, step), rel=1e-6)


def _in_packs(corpus, packs, num_ranks):
    """Packs of up to 8 tokens, one a rank, as one step."""
    return plan_over_slots(
        corpus,
        packs,
        [1] * (len(packs) // num_ranks),
        budget=8,
        num_ranks=num_ranks,
        num_microbatches=len(packs) // num_ranks,
    )


def test_br_g01_a_short_microbatch_does_not_weigh_more():
    """Loss sums 6 and 6 over 3 and 1 trained tokens: 3.0, not the mean of means 4.0."""
    corpus = MemoryCorpus([([1] * 4, [0, 1, 1, 1]), ([1] * 4, [0, 0, 0, 1])])
    loss = {0: 2.0, 1: 6.0}
    for num_ranks in (1, 2):
        plan = _in_packs(corpus, [[0], [1]], num_ranks)
        for name, right in (("ave-token", 3.0), ("token-mean", 4.0)):
            measured = _step_loss(plan, corpus, name, 0, lambda i, _: loss[i])
            assert measured == pytest.approx(right, rel=1e-6)


@pytest.mark.parametrize("packs", [[[0, 1, 2]], [[0], [1, 2]], [[0], [2], [1], []]])
def test_br_g10_the_average_is_explicit_and_independent_of_ranks(packs):
    """Targets 2, 1, 1 with losses (4, 4), 2, 3: token mean 3.25, sample mean 3.0."""
    corpus = MemoryCorpus([([1] * 3, [0, 1, 1]), ([1] * 2, [0, 1]), ([1] * 2, [0, 1])])
    loss = {0: 4.0, 1: 2.0, 2: 3.0}
    for num_ranks in {1, 2, 4} & {1, len(packs)}:
        plan = _in_packs(corpus, packs, num_ranks)
        values = {
            name: _step_loss(plan, corpus, name, 0, lambda i, _: loss[i])
            for name in LOSS_NORMALIZERS
        }
        assert values["ave-token"] == pytest.approx(3.25, rel=1e-6)
        assert values["sample-mean"] == pytest.approx(3.0, rel=1e-6)
        assert values["sum"] == pytest.approx(13.0, rel=1e-6)


def test_totals_count_tokens_sequences_and_slots_by_step():
    """A pack of CP size c counts for c ranks; a filler counts for none."""
    corpus = MemoryCorpus([([1] * 5, [0, 0, 1, 1, 1]), ([1] * 16, [0] * 15 + [1])])
    plan = plan_over_slots(
        corpus,  # type: ignore[arg-type]
        [[0], [], [1]],
        [1, 2],
        budget=8,
        num_ranks=2,
        num_microbatches=2,
    )
    totals = step_totals(plan, corpus.num_trained)
    assert totals.trained_tokens.tolist() == [4]
    assert totals.real_tokens.tolist() == [21]
    assert totals.sequences.tolist() == [2]
    assert totals.trained_slots.tolist() == [3]
    assert totals.pack_trained_tokens.tolist() == [3, 0, 1]


@pytest.mark.parametrize("normalizer", LOSS_NORMALIZERS)
def test_br_b01_weights_are_finite_without_trained_tokens(normalizer):
    weights = sequence_weights(
        normalizer,
        sequence_trained=np.array([0, 3]),
        step_trained=3,
        step_sequences=2,
        step_slots=1,
        pack_trained=0,
        cp_size=1,
    )
    assert np.isfinite(weights).all()


def test_an_unknown_normalizer_is_refused():
    with pytest.raises(ValueError, match="loss normalizer 'mean' is unknown"):
        sequence_weights(
            "mean",
            sequence_trained=np.array([1]),
            step_trained=1,
            step_sequences=1,
            step_slots=1,
            pack_trained=1,
            cp_size=1,
        )
