"""A process that only loads is killed again and again: no sample is lost or repeated."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_hbp.corpus import Corpus, write_corpus
from megatron_hbp.dataset import HbpDataset
from megatron_hbp.level import Level
from megatron_hbp.plan import Plan
from megatron_hbp.planner import build_plan
from megatron_hbp.sampler import MicrobatchSampler

EPOCHS = 3
STEPS_A_STATE = 3
SEQUENCES = 4000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus whose tokens tell their sequence, and a plan of several levels and epochs."""
    folder = tmp_path_factory.mktemp("loader")
    lens = np.clip(np.random.default_rng(0).lognormal(3.0, 1.0, SEQUENCES), 2, 512).astype(int)
    pairs = ((np.full(n, i), np.ones(n, np.uint8)) for i, n in enumerate(lens))
    corpus = write_corpus(folder / "corpus", pairs, vocab_size=SEQUENCES, end_id=-1)
    levels = [Level(128, 1), Level(512, 4)]
    build_plan(
        corpus.seq_lens, levels, 4, 2, epochs=EPOCHS, first_trained=corpus.first_trained
    ).save(folder / "plan")
    return folder


def load(folder: Path, run: Path, num_workers: int) -> None:
    """Reads from the saved state on; logs the ids that the tokens of each step tell.

    All ranks in one process. A line is on its way to the file before the state counts it.
    """
    plan, corpus = Plan.load(folder / "plan"), Corpus.open(folder / "corpus")
    state = run / "state.json"
    consumed = json.loads(state.read_text())["consumed"] if state.exists() else 0
    loaders = [
        iter(
            torch.utils.data.DataLoader(
                HbpDataset(plan, corpus, rank),
                batch_size=None,
                sampler=MicrobatchSampler(plan, consumed),
                num_workers=num_workers,
            )
        )
        for rank in range(plan.num_ranks)
    ]
    with (run / "log.jsonl").open("a") as log:
        for step in range(consumed, plan.num_steps):
            ids = []
            for _ in range(plan.num_microbatches):
                ids += sequences_in([next(loader) for loader in loaders])
            log.write(json.dumps({"step": step, "ids": ids}) + "\n")
            log.flush()
            if (step + 1) % STEPS_A_STATE == 0 or step + 1 == plan.num_steps:
                scratch = run / f"state.{os.getpid()}"
                scratch.write_text(json.dumps({"consumed": step + 1}))
                scratch.replace(state)


def sequences_in(items: list[dict]) -> list[int]:
    """What the tokens of all ranks tell about one micro-batch, checked token by token."""
    ids = []
    for first, item in enumerate(items):
        if item["cp_rank"]:
            continue
        bounds = item["cu_seqlens"].tolist()
        width = bounds[-1] // items[0]["tokens"].numel()
        tokens = torch.cat([part["tokens"][0] for part in items[first : first + width]])
        for number in range(item["num_documents"]):
            document = tokens[bounds[number] : bounds[number + 1]]
            assert (document == document[0]).all()
            ids.append(int(document[0]))
    return ids


def ids_by_epoch(run: Path, plan: Plan) -> list[list[int]]:
    """What counts of the log: of each step the line that was written last."""
    last = {}
    for line in (run / "log.jsonl").read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a kill in the middle of a line: the step comes again
        last[entry["step"]] = entry["ids"]
    assert sorted(last) == list(range(plan.num_steps))
    epochs: list[list[int]] = [[] for _ in range(plan.epochs)]
    for step, ids in last.items():
        epochs[int(np.searchsorted(plan.epoch_offsets, step, side="right")) - 1] += ids
    return epochs


def killed_until_done(folder: Path, run: Path, kills: int, num_workers: int) -> list[int]:
    """Kills a loader after a random number of steps, then lets it end; the state at each kill."""
    randomness = random.Random(kills)
    context = multiprocessing.get_context("fork")
    log, state = run / "log.jsonl", run / "state.json"
    log.touch()
    states = []
    for _ in range(kills):
        wanted = log.read_bytes().count(b"\n") + randomness.randint(0, 6)
        process = context.Process(target=load, args=(folder, run, num_workers))
        process.start()
        while log.read_bytes().count(b"\n") < wanted and process.is_alive():
            time.sleep(0.0005)
        time.sleep(randomness.uniform(0, 0.002))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        states.append(json.loads(state.read_text())["consumed"] if state.exists() else 0)
    process = context.Process(target=load, args=(folder, run, num_workers))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return states


@pytest.mark.parametrize(
    ("kills", "num_workers"),
    [
        (3, 0),
        pytest.param(50, 0, marks=pytest.mark.slow),
        pytest.param(5, 2, marks=pytest.mark.slow),
    ],
)
def test_kill_9_of_a_loader_loses_and_repeats_nothing(folder, tmp_path, kills, num_workers):
    plan = Plan.load(folder / "plan")
    states = killed_until_done(folder, tmp_path, kills, num_workers)
    assert states == sorted(states)
    assert 0 < states[-1] < plan.num_steps  # the kills fell into the run, not after it
    for epoch in ids_by_epoch(tmp_path, plan):
        assert Counter(epoch) == Counter(range(SEQUENCES))
    print(f"{kills} kills, states after them {states}, {plan.num_steps} steps")
