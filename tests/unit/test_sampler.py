"""What ranks read, in which order, over epochs, workers and restarts: all ranks in one process."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_hbp.dataset import HbpDataset
from megatron_hbp.level import Level
from megatron_hbp.planner import build_plan
from megatron_hbp.sampler import CyclicSampler, MicrobatchSampler
from tests.unit.memory_corpus import random_memory_corpus

ROOT = Path(__file__).resolve().parents[2]


def _step_ids(plan, steps):
    """Per step, the sequence ids that all ranks together read, each pack counted once."""
    seen = []
    for step in steps:
        ids = []
        for microbatch in range(step * plan.num_microbatches, (step + 1) * plan.num_microbatches):
            for rank in range(plan.num_ranks):
                pack, cp_rank = plan.pack_index(microbatch, rank)
                if cp_rank == 0:
                    ids += plan.pack(pack).tolist()
        seen.append(ids)
    return seen


def _joined(lists):
    return list(itertools.chain.from_iterable(lists))


def _sampled_steps(plan, consumed=0):
    """The steps that a sampler yields; their micro-batches are checked to be whole and in order."""
    microbatches = list(MicrobatchSampler(plan, consumed))
    assert len(microbatches) == len(MicrobatchSampler(plan, consumed))
    steps = np.array(microbatches, dtype=int).reshape(-1, plan.num_microbatches)
    assert (steps % plan.num_microbatches == np.arange(plan.num_microbatches)).all()
    return (steps[:, 0] // plan.num_microbatches).tolist()


def _one_sequence_a_pack(num_sequences, num_ranks, epochs, num_microbatches=1):
    lens = np.full(num_sequences, 8)
    return build_plan(lens, [Level(8, 1)], num_ranks, num_microbatches, epochs=epochs)


@pytest.mark.parametrize("mixing", ["step", "microbatch"])
def test_every_epoch_is_every_sequence_once(mixing):
    corpus = random_memory_corpus([2 + 7 * i % 60 for i in range(101)])
    plan = build_plan(
        corpus.seq_lens,
        (Level(32, 1), Level(64, 2)),
        4,
        num_microbatches=2,
        epochs=3,
        mixing=mixing,
    )
    orders = []
    for first, end in zip(plan.epoch_offsets, plan.epoch_offsets[1:], strict=False):
        ids = _joined(_step_ids(plan, range(first, end)))
        assert sorted(ids) == list(range(101))
        orders.append(ids)
    assert orders[0] != orders[1] != orders[2]


def test_br_j01_ranks_have_equal_counts_to_the_last_step():
    """10 sequences over 3 ranks, 3 epochs: the same micro-batches for every rank, none repeated."""
    corpus = random_memory_corpus([8] * 10)
    plan = _one_sequence_a_pack(10, 3, 3)
    counts = set()
    for rank in range(3):
        dataset = HbpDataset(plan, corpus, rank)
        counts.add(sum(1 for _ in map(dataset.__getitem__, MicrobatchSampler(plan))))
    assert counts == {plan.num_steps}
    for ids in _step_ids(plan, range(plan.num_steps)):
        assert len(set(ids)) == len(ids) > 0
    assert sorted(_joined(_step_ids(plan, range(plan.num_steps)))) == sorted([*range(10)] * 3)


def test_br_j02_the_resume_offset_counts_once():
    """10 packs, 2 a step: resumed after 6, epoch 0 has 2 steps left and epoch 1 all 10 packs."""
    plan = _one_sequence_a_pack(10, 2, 2)
    assert plan.epoch_offsets.tolist() == [0, 5, 10]
    resumed = _sampled_steps(plan, consumed=3)
    assert resumed == [3, 4, 5, 6, 7, 8, 9]
    assert sorted(_joined(_step_ids(plan, resumed[2:]))) == list(range(10))
    whole = _step_ids(plan, _sampled_steps(plan))
    assert _step_ids(plan, resumed) == whole[3:]


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_br_j06_every_resume_point_continues_the_same_order(num_microbatches):
    """10 sequences, 2 a step, 3 epochs: resumed anywhere, equal to the run without a stop."""
    plan = _one_sequence_a_pack(10, 2 // num_microbatches, 3, num_microbatches)
    whole = _step_ids(plan, _sampled_steps(plan))
    assert len(whole) == 15
    for consumed in range(16):
        assert _step_ids(plan, _sampled_steps(plan, consumed)) == whole[consumed:]


def _loaded(plan, corpus, consumed=0, **loader):
    dataset = HbpDataset(plan, corpus, 1)
    loaded = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        sampler=MicrobatchSampler(plan, consumed),  # type: ignore[arg-type]  # an iterable will do
        generator=torch.Generator(),
        **loader,
    )
    return [(item["step"], item["microbatch"], item["tokens"].tolist()) for item in loaded]


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:This process")
@pytest.mark.parametrize("consumed", range(1, 15))
def test_br_j06_every_resume_point_with_two_workers(consumed):
    corpus = random_memory_corpus([8] * 10)
    plan = _one_sequence_a_pack(10, 2, 3)
    whole = _loaded(plan, corpus)
    assert len(whole) == 15
    assert _loaded(plan, corpus, consumed=consumed, num_workers=2) == whole[consumed:]


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:This process")
def test_br_j09_order_does_not_depend_on_workers():
    """0, 1 and 4 workers, persistent or not: the ids of all three epochs."""
    corpus = random_memory_corpus([8] * 10)
    plan = _one_sequence_a_pack(10, 2, 3)
    expected = _loaded(plan, corpus)
    assert [step for step, _, _ in expected] == list(range(15))
    first_epoch, second_epoch = expected[:5], expected[5:10]
    assert [tokens for *_, tokens in first_epoch] != [tokens for *_, tokens in second_epoch]
    for num_workers in (1, 4):
        for persistent in (False, True):
            loader = {"num_workers": num_workers, "persistent_workers": persistent}
            assert _loaded(plan, corpus, **loader) == expected


def test_br_j10_processes_with_other_random_state_build_the_same_plan():
    """Two processes with other hash seeds: one plan, in it every id once an epoch."""
    script = (
        "import random, sys; import numpy as np; seed = int(sys.argv[1]); random.seed(seed);"
        "np.random.seed(seed); from megatron_hbp import Level, build_plan;"
        "lens = np.arange(2, 102) % 50 + 2;"
        "plan = build_plan(lens, [Level(64, 1), Level(128, 2)], 4, 2, epochs=2);"
        "print(plan.hash(), plan.epochs, plan.num_steps)"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", script, seed],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
    lens = np.arange(2, 102) % 50 + 2
    plan = build_plan(lens, [Level(64, 1), Level(128, 2)], 4, 2, epochs=2)
    assert answers == {f"{plan.hash()} 2 {plan.num_steps}\n"}
    for first, end in zip(plan.epoch_offsets, plan.epoch_offsets[1:], strict=False):
        assert sorted(_joined(_step_ids(plan, range(first, end)))) == list(range(100))


@pytest.mark.parametrize("consumed", [-1, 6])
def test_more_steps_consumed_than_planned_is_refused(consumed):
    with pytest.raises(ValueError, match=rf"{consumed} steps are consumed, the plan has 5: the ch"):
        MicrobatchSampler(_one_sequence_a_pack(10, 2, 1), consumed)


def test_evaluation_restarts_at_its_first_microbatch():
    plan = _one_sequence_a_pack(6, 2, 1)
    iterator = iter(CyclicSampler(plan))
    assert [next(iterator) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
