"""Time and memory per sequence with 1M, 10M and 100M sequences, each in a process of its own."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_figures import Figure, Row, at_most, shown
from benchmarks.planner_workloads import Workloads

BASE = 1_000_000
MAX_SLOWDOWN = {10_000_000: 2.0, 100_000_000: 2.5}
MAX_BYTES = 24.0
METHODS = ("best_fit", "best_fit_decreasing", "build_plan")
_ROUNDS = {BASE: 12, 10_000_000: 3, 100_000_000: 2}


def scaling(workloads: Workloads) -> Row:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.npy"
        np.save(base, workloads.lengths("tulu", BASE))
        for n, rounds in _ROUNDS.items():
            large = base
            if n != BASE:
                large = Path(folder) / "large.npy"
                np.save(large, workloads.large("tulu", n))
            for method in METHODS:
                figures += _figures(method, n, _measure(large, base, method, rounds))
    return Row(
        "scaling",
        "tulu, cap 131072 (plan: 16384:1 + 131072:8), int64 lengths",
        figures,
        [
            "slowdown: time per sequence over that of 1M, both in one process, in turns",
            "extra memory: peak resident size over that before the call, when the lengths are "
            "there; the result is part of it; two threads",
        ],
    )


def _measure(large: Path, base: Path, method: str, rounds: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.planner_memory", str(large), str(base), method]
    done = subprocess.run(
        [*command, str(rounds)], check=True, stdout=subprocess.PIPE, text=True, timeout=900
    )
    return json.loads(done.stdout)


def _figures(method: str, n: int, found: dict[str, Any]) -> list[Figure]:
    label = f"{method}, {n // 1_000_000}M"
    nanos = found["seconds"] / n * 1e9
    time = shown(f"{label}: time a sequence", nanos, ".1f ns")
    memory, extra = f"{label}: extra bytes a sequence", found["extra_bytes"] / n
    if n not in MAX_SLOWDOWN:  # what does not grow with the sequences counts here
        return [time, shown(memory, extra, ".2f")]
    slowdown = nanos / (found["base_seconds"] / BASE * 1e9)
    return [
        time,
        at_most(f"{label}: slowdown", slowdown, MAX_SLOWDOWN[n], ".2f x"),
        at_most(memory, extra, MAX_BYTES, ".2f"),
    ]
