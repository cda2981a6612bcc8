"""A rehearsal: corpora made, the scaled run trained, killed and resumed, and judged.

Guarantees (asserted by tests/host/test_rehearse.py):
- everything is written in one folder;
- a run that fails ends the rehearsal with the end of its first failed rank's log.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_hbp.corpus.joint import open_corpora
from megatron_hbp.normalizer import kept_trained, step_totals
from megatron_hbp.plan import Plan
from megatron_hbp.recipe import Recipe
from megatron_hbp.rehearsal.corpus import made_up_lengths, scaled_lengths, write_corpora
from megatron_hbp.rehearsal.launcher import Ended, Kill, RehearsalError, launcher
from megatron_hbp.rehearsal.lengths import read_lengths
from megatron_hbp.rehearsal.scale import WEIGHTS_STEPS, Scaled, corpus_folders
from megatron_hbp.rehearsal.verdict import Verdict, judge

_RUN_SECONDS = 240.0
_TAIL_LINES = 25
_STEPS_AFTER_CHECKPOINT = 2


@dataclass(frozen=True)
class Rehearsal:
    """seconds: of all runs and what they needed, wall time."""

    verdict: Verdict
    seconds: float


def write_data(recipe: Recipe, scaled: Scaled, folder: Path) -> None:
    """The corpora of a rehearsal. Raises ValueError for lengths that the recipe cannot train."""
    if recipe.lengths is None:
        lengths = made_up_lengths(scaled.levels)
    else:
        lengths = _checked(read_lengths(recipe.lengths), recipe, scaled)
    places = scaled.places
    per_microbatch = places.num_ranks * scaled.levels[0].pack_len // scaled.levels[0].cp_size
    per_step = per_microbatch * places.num_microbatches
    for flag, seed, num_steps in (
        ("hbp-corpus", 1, scaled.num_steps // scaled.epochs),
        ("hbp-valid-corpus", 1001, 1),
    ):
        count = scaled.count(flag)
        if count:
            write_corpora(
                corpus_folders(folder, flag, count),
                lengths,
                scaled.levels,
                num_tokens=num_steps * per_step,
                per_microbatch=per_microbatch if num_steps > 1 else 0,
                seed=seed,
            )


def _checked(seq_lens: np.ndarray, recipe: Recipe, scaled: Scaled) -> np.ndarray:
    longest = scaled.levels_before[-1]
    beyond = int((seq_lens > longest.pack_len).sum())
    if beyond and scaled.flags.get("hbp-overlong", "error") == "error":
        raise ValueError(
            f"{beyond} sequences of {recipe.lengths} are longer than the longest level {longest}; "
            "add a longer --hbp-level, or --hbp-overlong drop or truncate"
        )
    return scaled_lengths(seq_lens, scaled.levels_before, scaled.levels)


def rehearse(scaled: Scaled, folder: Path, say: Callable[[str], None]) -> Rehearsal:
    """Trains over the corpora in `folder`. say: gets a line for each thing that is done.

    Raises RehearsalError, also when megatron cannot be loaded.
    """
    started = time.monotonic()
    argv = scaled.command_line(folder)
    world = scaled.places.num_processes
    step_log, checkpoints = folder / "steps", folder / "checkpoints"
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    at = scaled.save_interval + _STEPS_AFTER_CHECKPOINT
    with launcher(folder / "launcher.log") as host:
        say("loading megatron")
        host.wait_until_loaded()
        if scaled.starts_from_weights:
            say(f"run 0: {world} processes make weights for --pretrained-checkpoint")
            words, logs = scaled.weights_command_line(folder), folder / "run-0"
            _check_ended(host.run(words, world, logs, timeout_seconds=_RUN_SECONDS), logs)
        say(
            f"run 1: {world} processes; saves after step {scaled.save_interval}, killed after "
            f"step {at}"
        )
        first = host.run(
            argv,
            world,
            folder / "run-1",
            timeout_seconds=_RUN_SECONDS,
            kill=Kill(step_log, tracker, at),
        )
        _check_ended(first, folder / "run-1")
        if not first.killed:
            raise RehearsalError(
                f"run 1 ended before its step {at} was logged and a checkpoint was there"
                f"{_tail(folder / 'run-1' / 'rank-0.log')}"
            )
        say("run 2: the same command again, to the end")
        second = host.run(argv, world, folder / "run-2", timeout_seconds=_RUN_SECONDS)
        _check_ended(second, folder / "run-2")
    weights_log = folder / WEIGHTS_STEPS if scaled.starts_from_weights else None
    plan = _trained_plan(folder)
    corpus = open_corpora(corpus_folders(folder, "hbp-corpus", scaled.count("hbp-corpus")))
    pack_trained = step_totals(plan, kept_trained(plan, corpus)).pack_trained_tokens
    verdict = judge(step_log, plan, pack_trained, weights_log)
    return Rehearsal(verdict, time.monotonic() - started)


def _check_ended(ended: Ended, logs: Path) -> None:
    if not ended.failed:
        return
    how = f"did not end within {_RUN_SECONDS:.0f} s" if ended.timed_out else "failed"
    # ranks that wait for a failed one end with errors of their own: the first one knows why
    raise RehearsalError(
        f"{logs.name}: rank {ended.failed[0]} {how}{_tail(logs / f'rank-{ended.failed[0]}.log')}"
    )


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"; the end of {log}:", *lines[-_TAIL_LINES:]])


def _trained_plan(folder: Path) -> Plan:
    """The plan of the training corpora; one of the validation corpus may lie beside it."""
    plans = [Plan.load(file.parent) for file in sorted((folder / "plans").glob("*/plan.json"))]
    text = next((folder / "steps").glob("rank-*.jsonl")).read_text(errors="replace")
    for plan in plans:
        if plan.hash()[:12] in text:
            return plan
    raise RehearsalError(f"no plan in {folder / 'plans'} is that of {folder / 'steps'}")
