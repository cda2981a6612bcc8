"""`make bench-planner`: the planner's speed and quality beside other packers, each with its bar.

python -m benchmarks.planner_bench [--rows NAME ...] [--json FILE] [--workloads DIR] [--rounds N]
Ends with 1 when a bar is missed, with 2 for wrong use.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import planner_peers
from benchmarks.planner_batch import batch
from benchmarks.planner_figures import Row, head_text, row_text
from benchmarks.planner_long import long_levels
from benchmarks.planner_paper import efficiency, paper_ablation
from benchmarks.planner_scaling import scaling
from benchmarks.planner_shapes import shapes
from benchmarks.planner_speed import Speed
from benchmarks.planner_workloads import Workloads

_CHECKOUT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class _Bench:
    """What rows share: the lengths, and races that several rows read."""

    workloads: Workloads
    speed: Speed


# in the order in which they run
_ROWS: dict[str, Callable[[_Bench], Row]] = {
    "packers": lambda bench: bench.speed.packers(),
    "plan": lambda bench: bench.speed.plan(),
    "step": lambda bench: bench.speed.step(),
    "stages": lambda bench: bench.speed.stages(),
    "batch": lambda bench: batch(bench.workloads),
    "workloads": lambda bench: shapes(bench.workloads),
    "ablation": lambda bench: paper_ablation(bench.workloads),
    "efficiency": lambda bench: efficiency(bench.workloads),
    "long": lambda bench: long_levels(bench.workloads),
    "scaling": lambda bench: scaling(bench.workloads),
}


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            **{
                name: version or "not installed"
                for name, version in planner_peers.versions().items()
            },
        },
    }


def machine_text(found: dict[str, Any]) -> str:
    load = " ".join(f"{value:.2f}" for value in found["load"])
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join(
        [
            f"megatron_hbp {found['commit']}; {found['cpu']}, {found['cores']} cores; load {load}",
            *textwrap.wrap(versions, 100, break_on_hyphens=False),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="The planner beside other packers.")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=list(_ROWS),
        default=list(_ROWS),
        metavar="NAME",
        help=f"run these only: {', '.join(_ROWS)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures in this file")
    parser.add_argument(
        "--workloads",
        type=Path,
        metavar="DIR",
        default=_CHECKOUT.parent / "shared" / "bench",
        help="the folder of workloads.py (default: ../shared/bench beside the checkout)",
    )
    parser.add_argument(
        "--rounds", type=int, default=7, metavar="N", help="turns of each timed call (default 7)"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")
    try:
        workloads = Workloads(options.workloads)
    except ValueError as error:
        print(f"bench-planner: {error}", file=sys.stderr)
        return 2
    bench = _Bench(workloads, Speed(workloads, options.rounds))
    start = time.perf_counter()
    about = machine()
    print(f"{machine_text(about)}\n\n{head_text()}", flush=True)
    done = []
    for name, run in _ROWS.items():
        if name in options.rows:
            row = run(bench)
            done.append(row)
            print(f"\n{row_text(row)}", flush=True)
    seconds = time.perf_counter() - start
    missed = [f"{row.name}: {figure.name}" for row in done for figure in row.missed]
    load = os.getloadavg()[0]
    print(f"\n{seconds:.0f} s, load now {load:.2f}; {len(missed)} bars missed")
    for line in missed:
        print(f"  MISS {line}")
    if options.json is not None:
        document = {
            "machine": about,
            "seconds": seconds,
            "load_at_end": load,
            "rows": [row.document() for row in done],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if missed else 0


def _commit() -> str:
    """The commit of the checkout, and whether files differ from it."""
    git = ["git", "-C", str(_CHECKOUT)]
    try:
        found = [
            subprocess.run([*git, *words], check=True, capture_output=True, text=True).stdout
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return "of no known commit"
    return found[0].strip() + (" with changes" if found[1].strip() else "")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
