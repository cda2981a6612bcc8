"""What the files of --hbp-step-log say was trained, held against the plan.

Guarantees (asserted by tests/unit/test_trained.py):
- a step counts when every micro-batch of it was logged with exactly the plan's sequences; together
  with Plan.audit() that is each sequence once per epoch, or as often as its weight says;
- what was logged of later steps before a restart does not count: the restart went back to a
  checkpoint; without a restart no step may be missing or come again, but for one that the host ran
  again at once;
- a line that a killed process left unfinished is passed over, other damage is reported.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp.plan import Plan

_SHOWN = 5  # problems and ids that are named


@dataclass(frozen=True)
class Trained:
    """steps: of the plan that were trained, from its first one on. restarts: how often the run was
    started again. problems: in words, none when everything logged is as planned.
    """

    steps: int
    restarts: int
    problems: list[str]


@dataclass(frozen=True)
class LoggedStep:
    """A line of a rank: a step that it trained.

    rank: in the DP x CP domain. wall_seconds: from its first forward to its last backward.
    cpu_seconds: of each micro-batch. sequences: int64 [ids] of each micro-batch, on one of the
    ranks that share a pack. Times that the line does not tell are NaN, the rank -1.
    """

    rank: int
    wall_seconds: float
    cpu_seconds: list[float]
    sequences: list[np.ndarray]


@dataclass(frozen=True)
class Logged:
    """files: of each rank's file the steps that count, from the plan's first on; None for a step
    that is not logged. restarts, problems: as in Trained.
    """

    files: list[list[LoggedStep | None]]
    restarts: int
    problems: list[str]

    @property
    def steps(self) -> int:
        """Steps that every rank has logged."""
        return min(map(len, self.files))


def logged_steps(folder: str | Path, plan: Plan) -> Logged:
    """Reads the log of a run over `plan`. Raises ValueError when the folder holds none."""
    files = sorted(Path(folder).glob("rank-*.jsonl"))
    if not files:
        raise ValueError(f"{folder} holds no rank-*.jsonl; name the folder given to --hbp-step-log")
    name = plan.hash()[:12]
    problems: list[str] = []
    logs = []
    restarts = 0
    for file in files:
        log, starts = _read(file, name, problems)
        if starts:
            logs.append(log)
            restarts = max(restarts, starts - 1)
    if not logs:
        raise ValueError(f"{folder} holds no line of plan {name}; name the plan that was trained")
    return Logged(logs, restarts, problems)


def trained_steps(folder: str | Path, plan: Plan) -> Trained:
    """What the log of a run over `plan` proves. Raises ValueError when the folder holds none."""
    logged = logged_steps(folder, plan)
    problems = logged.problems
    for step in range(min(logged.steps, plan.num_steps)):
        lines = [log[step] for log in logged.files]
        for m in range(plan.num_microbatches):
            problems += _microbatch_problems(
                plan, step, m, [[] if line is None else line.sequences for line in lines]
            )
        if len(problems) > _SHOWN:
            break
    if logged.steps > plan.num_steps:
        problems.append(f"{logged.steps} steps are logged, the plan has {plan.num_steps}")
    return Trained(logged.steps, logged.restarts, problems[:_SHOWN])


def _read(file: Path, name: str, problems: list[str]) -> tuple[list[LoggedStep | None], int]:
    """The steps that count; how many processes started."""
    log: list[LoggedStep | None] = []
    starts = 0
    torn = 0  # number of a line that must be a process's last
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        where = f"{file.name} line {number}"
        entry = _parsed(line)
        if torn and (entry is None or "start" not in entry):
            problems.append(f"{file.name} line {torn} is damaged")
            torn = 0
        if entry is None:
            torn = number
            continue
        torn = 0
        if entry["plan"] != name:
            continue
        if not _is_whole(entry):
            problems.append(f"{where} is damaged")
            break
        if "start" in entry:
            starts += 1
            if entry["start"] > len(log):
                problems.append(
                    f"{where}: the run goes on at step {entry['start']}, steps {len(log)} to "
                    f"{entry['start'] - 1} are not logged"
                )
                log += [None] * (entry["start"] - len(log))
            del log[entry["start"] :]
            continue
        step = entry["step"]
        if step == len(log) - 1:  # run again at once by the host
            log.pop()
        if step != len(log):
            problems.append(f"{where}: step {step} follows step {len(log) - 1} without a restart")
            break
        microbatches = entry["microbatches"]
        log.append(
            LoggedStep(
                entry.get("rank", -1),
                entry.get("wall_seconds", math.nan),
                [m.get("cpu_seconds", math.nan) for m in microbatches],
                [np.array(m["sequences"], dtype=np.int64) for m in microbatches],
            )
        )
    return log, starts


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "plan" in entry else None


def _is_whole(entry: dict[str, Any]) -> bool:
    if "start" in entry:
        return _is_count(entry["start"])
    microbatches = entry.get("microbatches")
    if not _is_count(entry.get("step")) or not isinstance(microbatches, list):
        return False
    ids = [m.get("sequences") if isinstance(m, dict) else None for m in microbatches]
    return all(isinstance(some, list) and all(map(_is_count, some)) for some in ids)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


def _microbatch_problems(
    plan: Plan, step: int, microbatch: int, ranks: list[list[np.ndarray]]
) -> list[str]:
    found = [rank[microbatch] for rank in ranks if len(rank) == plan.num_microbatches]
    at = step * plan.num_microbatches + microbatch
    first, end = plan.pack_offsets[plan.microbatch_offsets[at : at + 2]]
    wanted = np.sort(plan.sequence_ids[first:end])
    logged = np.sort(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)
    if np.array_equal(wanted, logged):
        return []
    missing = sorted((Counter(wanted.tolist()) - Counter(logged.tolist())).elements())
    extra = sorted((Counter(logged.tolist()) - Counter(wanted.tolist())).elements())
    return [
        f"step {step}, micro-batch {microbatch}: {len(missing)} sequences of the plan are not "
        f"logged {missing[:_SHOWN]}, {len(extra)} are logged that are not planned {extra[:_SHOWN]}"
    ]
