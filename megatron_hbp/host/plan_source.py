"""Where a run's plan and corpus come from: a plan folder, or planned at start-up.

Guarantees (asserted by tests/host/test_plan_source.py):
- one process of those that see the same cache folder plans, whichever rank it has; the others look
  for the folder, with a time limit, and none waits inside a collective. Where nodes have folders of
  their own each plans for itself: the same plan, byte for byte but for where its corpus lies;
- a plan is reused only for the same corpora, weights, levels, ranks, settings, alignment and code;
- a cached plan that is damaged is set aside, said so and made again, never read.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_hbp
from megatron_hbp.alignment import Alignment
from megatron_hbp.audit import array_hash
from megatron_hbp.claim import built_once
from megatron_hbp.config import PLAN_DEFAULTS, HbpConfig, flag_name
from megatron_hbp.corpus.joint import (
    JointCorpus,
    corpus_paths,
    open_corpora,
    parts_of,
    weighted_sources,
)
from megatron_hbp.corpus.store import Corpus
from megatron_hbp.kept import SequenceError, where_from
from megatron_hbp.level import Level, check_levels
from megatron_hbp.plan import FORMAT_VERSION, Plan
from megatron_hbp.planner import build_plan


@dataclass(frozen=True)
class RunShape:
    """What the host's arguments fix about a plan."""

    rank: int  # global rank of this process
    num_ranks: int
    num_microbatches: int
    num_stages: int
    num_virtual_stages: int
    alignment_of: Callable[[tuple[Level, ...]], Alignment]
    local_rank: int = 0  # within its node: the first tells how long it waits


def plan_settings(config: HbpConfig) -> dict[str, Any]:
    """What build_plan() is given of the flags that shape a plan, with their defaults."""
    return {
        name: default if getattr(config, name) is None else getattr(config, name)
        for name, default in PLAN_DEFAULTS.items()
    }


def training_plan(config: HbpConfig, shape: RunShape) -> tuple[Plan, Corpus | JointCorpus]:
    """The plan and corpus to train on. Raises ValueError when they or the flags disagree."""
    if config.plan is None:
        corpus = open_corpora(config.corpus)
        settings = plan_settings(config)
        return _planned(corpus, config.level, settings, config.source_weight, config, shape), corpus
    plan = Plan.load(config.plan)
    folders = config.corpus or plan.corpus_paths
    if not folders:
        raise ValueError(
            f"the plan {config.plan} was made from lengths and names no corpus; "
            "add --hbp-corpus DIR"
        )
    corpus = open_corpora(folders)
    _check_corpus(config, plan, corpus)
    check_plan_flags(config, plan)
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
    return _planned(corpus, train.levels, settings, None, config, shape), corpus


def check_plan(plan: Plan, shape: RunShape) -> None:
    """Raises ValueError unless a plan fits the run."""
    if plan.num_ranks != shape.num_ranks:
        raise ValueError(
            f"the plan is for {plan.num_ranks} ranks, the run has {shape.num_ranks} (world size / "
            f"(TP x PP)); plan again with --ranks {shape.num_ranks}, after a checkpoint with "
            "`hbp replan`"
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


def _check_corpus(config: HbpConfig, plan: Plan, corpus: Corpus | JointCorpus) -> None:
    folders = ", ".join(str(part.path) for part in parts_of(corpus))
    if plan.corpus_hash is not None and plan.corpus_hash != corpus.hash:
        given = corpus_paths(corpus)
        if given != plan.corpus_paths and sorted(given) == sorted(plan.corpus_paths):
            raise ValueError(
                f"the plan {config.plan} was made from {', '.join(plan.corpus_paths)} in this "
                "order; name --hbp-corpus in the same order, or leave it out"
            )
        raise ValueError(
            f"the plan {config.plan} was made from another corpus than {folders} (hash "
            f"{plan.corpus_hash[:12]}, found {corpus.hash[:12]}); plan again or name its corpus"
        )
    if len(plan.seq_lens) != len(corpus.seq_lens):
        raise ValueError(
            f"the plan {config.plan} has {len(plan.seq_lens)} sequences, the corpus {folders} "
            f"{len(corpus.seq_lens)}; plan again or name its corpus"
        )
    if plan.corpus_hash is None and plan.seq_lens_hash != array_hash(corpus.seq_lens):
        raise ValueError(
            f"the plan {config.plan} was made from other lengths than those of the corpus "
            f"{folders}; plan again or name its corpus"
        )


def check_plan_flags(config: HbpConfig, plan: Plan) -> None:
    """Raises ValueError where a flag contradicts the plan that --hbp-plan names."""
    for name in ("level", "source_weight", *PLAN_DEFAULTS):
        given = getattr(config, name)
        if given is None or given == ():
            continue
        if name == "mixing" and given == "auto":
            continue
        have = {"level": plan.levels, "source_weight": plan.source_weights or "none"}.get(
            name, getattr(plan, name, None)
        )
        if given != have:
            shown = [_as_given(value) for value in (given, have)]
            raise ValueError(
                f"{flag_name(name)} {shown[0]} contradicts the plan {config.plan}, which has "
                f"{shown[1]}; leave the flag out or make another plan"
            )


def _as_given(value: Any) -> str:
    """A value as its flag is given, repeated ones side by side."""
    if isinstance(value, tuple):
        return " ".join(map(_as_given, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _planned(
    corpus: Corpus | JointCorpus,
    levels: tuple[Level, ...],
    settings: dict[str, Any],
    source_weights: tuple[float, ...] | None,
    config: HbpConfig,
    shape: RunShape,
) -> Plan:
    check_levels(levels, shape.num_ranks)
    wanted = shape.alignment_of(levels)
    source_ids = weighted_sources(corpus, source_weights)
    key = {
        "corpus": corpus.hash,
        "source_weights": source_weights,
        "levels": [str(level) for level in levels],
        "num_ranks": shape.num_ranks,
        "num_microbatches": shape.num_microbatches,
        "num_stages": shape.num_stages,
        "num_virtual_stages": shape.num_virtual_stages,
        "alignment": dataclasses.asdict(wanted),
        "code": _code_hash(),
        "format_version": FORMAT_VERSION,
        **settings,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    cache = Path(config.plan_cache or parts_of(corpus)[0].path / "plans")
    folder = cache / digest[:24]

    def build() -> None:
        if folder.exists() and not _set_aside_damaged(folder):
            return  # another host made it this moment
        start = time.monotonic()
        _say(f"rank {shape.rank} plans {len(corpus)} sequences in {folder}")
        try:
            build_plan(
                corpus.seq_lens,
                levels,
                shape.num_ranks,
                num_microbatches=shape.num_microbatches,
                num_stages=shape.num_stages,
                num_virtual_stages=shape.num_virtual_stages,
                alignment=wanted,
                first_trained=corpus.first_trained,
                source_ids=source_ids,
                source_weights=source_weights,
                corpus_hash=corpus.hash,
                corpus_paths=corpus_paths(corpus),
                **settings,
            ).save(folder)
        except SequenceError as error:
            raise ValueError(where_from(error, corpus.origin)) from None
        _say(f"planned in {time.monotonic() - start:.1f} s")

    def report(waited: str) -> None:
        if shape.local_rank == 0:
            _say(f"rank {shape.rank} {waited} to make the plan in {folder}")

    def time_out(waited: str) -> ValueError:
        return ValueError(
            f"rank {shape.rank} {waited} to make the plan in {folder}; look at the log of that "
            "process, make the plan beforehand with `hbp plan` and name it with --hbp-plan, or "
            "raise --hbp-plan-timeout"
        )

    try:
        return built_once(
            folder,
            lambda: _cached(folder),
            build,
            timeout_seconds=config.plan_timeout,
            time_out=time_out,
            report=report,
        )
    except OSError as error:
        raise ValueError(
            f"the plan cache {cache} cannot be used ({error}); name a folder that this user may "
            "write with --hbp-plan-cache, or make the plan beforehand with `hbp plan` and name it "
            "with --hbp-plan"
        ) from None


def _cached(folder: Path) -> Plan | None:
    """The plan in a folder of the cache, None when there is none or a damaged one."""
    if not (folder / "plan.json").exists():
        return None
    try:
        return Plan.load(folder)
    except ValueError:
        return None


def _set_aside_damaged(folder: Path) -> bool:
    """Renames a folder of the cache that holds no whole plan; False when it holds one."""
    try:
        Plan.load(folder)
    except ValueError as error:
        reason = str(error)
    else:
        return False
    names = (f"{folder.name}.damaged-{number}" for number in range(1, 1 << 30))
    aside = next(folder.with_name(name) for name in names if not folder.with_name(name).exists())
    with contextlib.suppress(FileNotFoundError):  # another host was faster
        folder.rename(aside)
    _say(f"{reason}: it is set aside as {aside} and made again")
    return True


@functools.cache
def _code_hash() -> str:
    """SHA-256 of the planner: every Python and C++ module directly in the package."""
    digest = hashlib.sha256()
    folder = Path(megatron_hbp.__file__).parent
    for file in sorted([*folder.glob("*.py"), *folder.glob("_C*.so")]):
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()


def _say(text: str) -> None:
    print(f"> hbp: {text}", flush=True)
