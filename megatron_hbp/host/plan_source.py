"""Where a run's plan and corpus come from: a plan folder, or planned at start-up by rank 0.

Guarantees:
- no rank waits for the plan inside a collective: they poll for its folder, with a time limit;
- a plan is reused only for the same corpus, levels, ranks, settings, alignment and release.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_hbp.alignment import Alignment
from megatron_hbp.config import PLAN_DEFAULTS, HbpConfig, flag_name
from megatron_hbp.corpus.store import Corpus
from megatron_hbp.level import Level, check_levels
from megatron_hbp.plan import FORMAT_VERSION, Plan
from megatron_hbp.planner import build_plan

_POLL_SECONDS = 0.2
_REPORT_SECONDS = 30.0


@dataclass(frozen=True)
class RunShape:
    """What the host's arguments fix about a plan."""

    rank: int  # global rank of this process
    num_ranks: int
    num_microbatches: int
    num_stages: int
    num_virtual_stages: int
    alignment_of: Callable[[tuple[Level, ...]], Alignment]


def training_plan(config: HbpConfig, shape: RunShape) -> tuple[Plan, Corpus]:
    """The plan and corpus to train on. Raises ValueError when they or the flags disagree."""
    if config.plan is None:
        assert config.corpus is not None
        corpus = Corpus.open(config.corpus)
        settings = {
            name: default if getattr(config, name) is None else getattr(config, name)
            for name, default in PLAN_DEFAULTS.items()
        }
        return _planned(corpus, config.level, settings, config, shape), corpus
    plan = Plan.load(config.plan)
    folder = config.corpus or (plan.corpus_paths[0] if plan.corpus_paths else None)
    if folder is None:
        raise ValueError(
            f"the plan {config.plan} was made from lengths and names no corpus; "
            "add --hbp-corpus DIR"
        )
    corpus = Corpus.open(folder)
    if plan.corpus_hash is not None and plan.corpus_hash != corpus.hash:
        raise ValueError(
            f"the plan {config.plan} was made from another corpus than {folder} (hash "
            f"{plan.corpus_hash[:12]}, found {corpus.hash[:12]}); plan again or name its corpus"
        )
    if len(plan.seq_lens) != len(corpus.seq_lens):
        raise ValueError(
            f"the plan {config.plan} has {len(plan.seq_lens)} sequences, the corpus {folder} "
            f"{len(corpus.seq_lens)}; plan again or name its corpus"
        )
    _check_flags(config, plan)
    check_plan(plan, shape)
    return plan, corpus


def validation_plan(
    config: HbpConfig, train: Plan, num_microbatches: int, shape: RunShape
) -> tuple[Plan, Corpus] | None:
    """One epoch over the validation corpus at the training plan's levels, or None."""
    if config.valid_corpus is None:
        return None
    corpus = Corpus.open(config.valid_corpus)
    settings = PLAN_DEFAULTS | {"overlong": train.overlong, "seed": train.seed}
    # forward only: whether virtual stages take this number of micro-batches is the host's to say
    shape = dataclasses.replace(shape, num_microbatches=num_microbatches, num_virtual_stages=1)
    return _planned(corpus, train.levels, settings, config, shape), corpus


def check_plan(plan: Plan, shape: RunShape) -> None:
    """Raises ValueError unless a plan fits the run."""
    if plan.num_ranks != shape.num_ranks:
        raise ValueError(
            f"the plan is for {plan.num_ranks} ranks, the run has {shape.num_ranks} (world size / "
            f"(TP x PP)); plan again with --ranks {shape.num_ranks}"
        )
    if plan.num_microbatches != shape.num_microbatches:
        raise ValueError(
            f"the plan has {plan.num_microbatches} micro-batches a step, --global-batch-size gives "
            f"{shape.num_microbatches}; it must be ranks x micro-batches = "
            f"{plan.num_ranks * plan.num_microbatches}"
        )
    wanted = shape.alignment_of(plan.levels)
    if plan.alignment.budget_multiple % wanted.budget_multiple:
        raise ValueError(
            f"the plan aligns the token budget to {plan.alignment.budget_multiple}, the run needs "
            f"{wanted.budget_multiple} (TP and low-precision recipe); plan again with its flags"
        )
    if plan.alignment.document_multiples != wanted.document_multiples:
        raise ValueError(
            f"the plan aligns documents to {list(plan.alignment.document_multiples)}, the run "
            f"needs {list(wanted.document_multiples)}; plan again"
        )


def _check_flags(config: HbpConfig, plan: Plan) -> None:
    for name in ("level", *PLAN_DEFAULTS):
        given = getattr(config, name)
        if given is None or given == ():
            continue
        if name == "mixing" and given == "auto":
            continue
        have = plan.levels if name == "level" else getattr(plan, name)
        if given != have:
            shown = [" ".join(map(str, v)) if name == "level" else v for v in (given, have)]
            raise ValueError(
                f"{flag_name(name)} {shown[0]} contradicts the plan {config.plan}, which has "
                f"{shown[1]}; leave the flag out or make another plan"
            )


def _planned(
    corpus: Corpus,
    levels: tuple[Level, ...],
    settings: dict[str, Any],
    config: HbpConfig,
    shape: RunShape,
) -> Plan:
    check_levels(levels, shape.num_ranks)
    wanted = shape.alignment_of(levels)
    key = {
        "corpus": corpus.hash,
        "levels": [str(level) for level in levels],
        "num_ranks": shape.num_ranks,
        "num_microbatches": shape.num_microbatches,
        "num_stages": shape.num_stages,
        "num_virtual_stages": shape.num_virtual_stages,
        "alignment": dataclasses.asdict(wanted),
        "release": metadata.version("megatron_hbp"),
        "format_version": FORMAT_VERSION,
        **settings,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    cache = Path(config.plan_cache) if config.plan_cache else Path(corpus.path) / "plans"
    folder = cache / digest[:24]
    if shape.rank == 0 and not (folder / "plan.json").exists():
        build_plan(
            corpus.seq_lens,
            levels,
            shape.num_ranks,
            num_microbatches=shape.num_microbatches,
            num_stages=shape.num_stages,
            num_virtual_stages=shape.num_virtual_stages,
            alignment=wanted,
            first_trained=corpus.first_trained,
            source_ids=corpus.source_ids,
            corpus_hash=corpus.hash,
            corpus_paths=(str(corpus.path),),
            **settings,
        ).save(folder)
    _wait_for(folder, config.plan_timeout, shape.rank)
    return Plan.load(folder)


def _wait_for(folder: Path, timeout_seconds: float, rank: int) -> None:
    start = reported = time.monotonic()
    while not (folder / "plan.json").exists():
        now = time.monotonic()
        if now - start > timeout_seconds:
            raise ValueError(
                f"rank {rank} waited {timeout_seconds:.0f} s for rank 0's plan in {folder}; look "
                "at its log, make the plan beforehand with `hbp plan`, put --hbp-plan-cache on "
                "a file system that all ranks see, or raise --hbp-plan-timeout"
            )
        if now - reported > _REPORT_SECONDS:
            print(f"rank {rank}: waiting for rank 0's plan in {folder}", flush=True)
            reported = now
        time.sleep(_POLL_SECONDS)
