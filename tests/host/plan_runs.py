"""Ranks that ask for their plan, in this process or as processes of their own."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp.alignment import alignment
from megatron_hbp.config import HbpConfig
from megatron_hbp.corpus import Corpus, write_corpus
from megatron_hbp.host import plan_source
from megatron_hbp.host.plan_source import RunShape
from megatron_hbp.level import Level
from megatron_hbp.plan import Plan

LEVELS = (Level(64, 1), Level(128, 2))


def write(path: Path, lens: list[int], seed: int = 0, vocab: int = 100) -> Corpus:
    rng = np.random.default_rng(seed)
    rows = [(rng.integers(0, vocab, n), np.ones(n, dtype=np.uint8)) for n in lens]
    return write_corpus(path, rows, vocab_size=vocab, end_id=2)


def shape(**changes: Any) -> RunShape:
    settings: dict[str, Any] = {
        "rank": 0,
        "num_ranks": 4,
        "num_microbatches": 2,
        "num_stages": 1,
        "num_virtual_stages": 1,
        "alignment_of": lambda levels: alignment(tuple(level.cp_size for level in levels)),
    }
    return RunShape(**settings | changes)


def config(corpora: list[str], cache: Path | None = None, **changes: Any) -> HbpConfig:
    settings: dict[str, Any] = {
        "corpus": tuple(corpora),
        "level": LEVELS,
        "plan_cache": None if cache is None else str(cache),
    }
    return HbpConfig(**settings | changes)


def plan_of(settings: HbpConfig, **changes: Any) -> Plan:
    return plan_source.training_plan(settings, shape(**changes))[0]


def traced(folder: Path, seconds: float = 0.0) -> None:
    """From now on each build of this process leaves a file in `folder` and takes `seconds`."""
    build = plan_source.build_plan

    def wrapper(*args: Any, **kwargs: Any) -> Plan:
        number = len(list(folder.iterdir()))
        (folder / f"{os.getpid()}-{number}-{time.monotonic_ns()}").touch()
        time.sleep(seconds)
        return build(*args, **kwargs)

    plan_source.build_plan = wrapper


def one_rank(settings: HbpConfig, rank: int, traces: Path, seconds: float, answer: Path) -> None:
    """A process acting as `rank`; the hash of its plan goes to the file `answer`."""
    traced(traces, seconds)
    answer.write_text(plan_of(settings, rank=rank).hash())


def many_plans(corpora: list[str], cache: Path, rank: int, traces: Path, count: int) -> None:
    """Asks for plans of the seeds 0 .. count - 1, twice each."""
    traced(traces)
    for seed in range(count):
        for _ in range(2):
            plan = plan_of(config(corpora, cache, seed=seed), rank=rank)
            assert plan.seed == seed
            assert plan.audit() == []


def slow_build_then_collective(
    settings: HbpConfig,
    *,
    rank: int,
    traces: Path,
    seconds: float,
    group: Path,
    group_seconds: float,
) -> None:
    """Plans, then joins a gloo group of two whose collectives time out after group_seconds."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    traced(traces, seconds)
    plan = plan_of(settings, rank=rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{group}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=group_seconds),
    )
    value = torch.tensor([int(plan.hash()[:15], 16)])
    total = value.clone()
    dist.all_reduce(total)
    assert int(total) == 2 * int(value)
    dist.destroy_process_group()
