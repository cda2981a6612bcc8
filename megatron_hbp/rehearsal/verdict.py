"""Whether a rehearsal passed, from the step log of a run that was killed and went on.

Guarantees (asserted by tests/unit/test_rehearsal_verdict.py):
- it passes only when every step of the plan was trained with the plan's sequences, and each pack
  with as many trained tokens as the corpus has for it, across one restart that went on from a
  checkpoint; when every step that was trained twice has the same losses, bit for bit; when every
  loss is finite; when attention was given CP groups of each level's size, and every level was
  trained; and, where it starts from given weights, when its first losses are those that these
  weights have;
- each thing that is wrong is a problem in words that names the step and the file.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp.plan import Plan
from megatron_hbp.trained import trained_steps

_SHOWN = 5


@dataclass(frozen=True)
class Verdict:
    """resumed_at: steps of the plan that the second run found trained. repeated_steps: steps that
    both runs trained. microbatches: by the size of the CP group that attention was given. losses:
    mean loss per trained token of each step. problems: none when the rehearsal passed.
    """

    steps: int
    planned_steps: int
    sequences: int
    resumed_at: int
    repeated_steps: list[int]
    microbatches: dict[int, int]
    losses: list[float]
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems


def judge(
    step_log: Path, plan: Plan, pack_trained: np.ndarray, weights_log: Path | None = None
) -> Verdict:
    """The verdict on the log of two runs over a plan. Raises ValueError when there is no log.

    pack_trained: int [packs], trained tokens of each pack of the plan, by the corpus.
    weights_log: of the run that made the weights which the first of them starts from.
    """
    trained = trained_steps(step_log, plan)
    problems = list(trained.problems)
    files = sorted(step_log.glob("rank-*.jsonl"))
    runs = {file.name: _runs(file) for file in files}
    if trained.steps != plan.num_steps:
        problems.append(f"{trained.steps} of the plan's {plan.num_steps} steps were trained")
    starts = sorted({run["start"] for some in runs.values() for run in some[1:]})
    if trained.restarts != 1 or len(starts) != 1:
        problems.append(f"{trained.restarts} restarts were logged, there must be 1")
    elif starts[0] == 0:
        problems.append(
            "the second run started at step 0: it did not find the checkpoint of the first; give "
            "--load the folder of --save, and leave --finetune out"
        )
    repeated: set[int] = set()
    for name, some in runs.items():
        for first, second in pairwise(some):
            both = sorted(first["steps"].keys() & second["steps"].keys())
            repeated |= set(both)
            problems += _different(name, first["steps"], second["steps"], both)
        problems += _not_finite(name, some)
    if starts and starts[0] > 0 and not repeated:
        problems.append("no step was trained by both runs, so their losses cannot be compared")
    if weights_log is not None:
        problems += _other_weights(weights_log, runs)
    last = [_last(some) for some in runs.values()]
    problems += _other_packs(plan, pack_trained, list(zip(runs, last, _ranks(runs), strict=True)))
    counts = Counter(
        int(microbatch["cp_size"])
        for step in (last[0] if last else {}).values()
        for microbatch in step
    )
    problems += [
        f"no micro-batch of level {level} was trained"
        for level in plan.levels
        if counts[level.cp_size] == 0
    ]
    return Verdict(
        steps=trained.steps,
        planned_steps=plan.num_steps,
        sequences=len(plan.sequence_ids),
        resumed_at=starts[0] if starts else 0,
        repeated_steps=sorted(repeated),
        microbatches={level.cp_size: counts[level.cp_size] for level in plan.levels},
        losses=_mean_losses(last),
        problems=problems[: 2 * _SHOWN],
    )


def _runs(file: Path) -> list[dict[str, Any]]:
    """{"start", "rank", "steps": {step: micro-batches}} of each process that wrote the file."""
    runs: list[dict[str, Any]] = []
    for line in file.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by the kill
            continue
        if "start" in entry:
            runs.append({"start": entry["start"], "rank": entry["rank"], "steps": {}})
        elif runs and "step" in entry:
            runs[-1]["steps"][entry["step"]] = entry["microbatches"]
    return runs


def _ranks(runs: dict[str, list[dict[str, Any]]]) -> list[int]:
    """Of each file its rank in the DP x CP domain, which tensor-parallel ranks share; -1: none."""
    return [some[-1]["rank"] if some else -1 for some in runs.values()]


def _other_packs(
    plan: Plan,
    pack_trained: np.ndarray,
    logged: list[tuple[str, dict[int, list[dict[str, Any]]], int]],
) -> list[str]:
    """CP groups of another size than the level's, and packs with other tokens than the corpus'.

    What is trained is counted from the batches; levels and ids in the log are the plan's.
    """
    problems: list[str] = []
    missing = sorted(set(range(plan.num_ranks)) - {rank for _, _, rank in logged})
    if missing:
        return [f"ranks {missing[:_SHOWN]} logged nothing"]
    trained: Counter[tuple[int, int, int]] = Counter()  # of each copy of each pack
    copies: Counter[int] = Counter()
    for name, steps, rank in logged:
        for step, microbatches in steps.items():
            for m, microbatch in enumerate(microbatches):
                at = step * plan.num_microbatches + m
                if at >= len(plan.microbatch_level):
                    continue
                level = plan.levels[plan.microbatch_level[at]]
                if microbatch["cp_size"] != level.cp_size:
                    problems.append(
                        f"{name}: step {step}, micro-batch {m} of level {level} was trained with "
                        f"CP size {microbatch['cp_size']}"
                    )
                pack, _ = plan.pack_index(at, rank)
                trained[at, pack, copies[rank]] += microbatch["trained_tokens"]
        copies[rank] += 1
    for (at, pack, _), count in sorted(trained.items()):
        if count != pack_trained[pack]:
            step, m = divmod(at, plan.num_microbatches)
            problems.append(
                f"step {step}, micro-batch {m}: {count} tokens of pack {pack} were trained, the "
                f"corpus has {pack_trained[pack]} for its sequences"
            )
    return problems[:_SHOWN]


def _different(name: str, first: dict, second: dict, steps: list[int]) -> list[str]:
    problems = []
    for step in steps:
        losses = [[m["loss_sum"] for m in run[step]] for run in (first, second)]
        if losses[0] != losses[1]:
            problems.append(
                f"{name}: step {step} has losses {losses[0]} before the kill and {losses[1]} after "
                "it; they must be equal bit for bit"
            )
    return problems[:_SHOWN]


def _other_weights(weights_log: Path, runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The first step has the same losses with weights that were loaded as where they were made."""
    problems = []
    for name, some in runs.items():
        file = weights_log / name
        made = _runs(file) if file.exists() else []
        losses = [
            [m["loss_sum"] for m in found[0]["steps"].get(0, [])] if found else []
            for found in (made, some)
        ]
        if losses[0] != losses[1] or not losses[0]:
            problems.append(
                f"{name}: step 0 has losses {losses[1]} in run 1, {losses[0]} with the weights of "
                "--pretrained-checkpoint: they were not loaded; is --load a folder with a "
                "checkpoint already?"
            )
    return problems[:_SHOWN]


def _not_finite(name: str, runs: list[dict[str, Any]]) -> list[str]:
    wrong = sorted(
        {
            step
            for run in runs
            for step, microbatches in run["steps"].items()
            if not all(math.isfinite(m["loss_sum"]) for m in microbatches)
        }
    )
    return [f"{name}: the loss of step {step} is not finite" for step in wrong[:_SHOWN]]


def _last(runs: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """What counts of each step: the last run's."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for run in runs:
        steps |= run["steps"]
    return steps


def _mean_losses(ranks: list[dict[int, list[dict[str, Any]]]]) -> list[float]:
    means = []
    for step in sorted(set().union(*ranks)) if ranks else []:
        logged = [m for rank in ranks for m in rank.get(step, [])]
        trained = sum(m["trained_tokens"] for m in logged)
        means.append(sum(m["loss_sum"] for m in logged) / trained if trained else math.nan)
    return means
