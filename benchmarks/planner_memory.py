"""One call in a fresh process: its peak extra memory, then its time in turns with a smaller one.

python -m benchmarks.planner_memory LARGE.npy BASE.npy METHOD ROUNDS, run by planner_scaling.py.
Prints one line of JSON. Linux only.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_speed import CAPS, LEVELS, NUM_MICROBATCHES, NUM_RANKS
from megatron_hbp import build_plan
from megatron_hbp.packing import pack

_BASE_CALLS = 3  # for one of the large


def main(large_path: str, base_path: str, method: str, rounds: int) -> dict[str, float]:
    large, base = np.load(large_path), np.load(base_path)
    _call(method, base[:50_000])  # threads and modules are there before memory is counted
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    result = _call(method, large)
    extra = _status("VmHWM") - before
    del result
    seconds = base_seconds = float("inf")
    for _ in range(rounds):
        for _ in range(_BASE_CALLS):
            base_seconds = min(base_seconds, _seconds(method, base))
        seconds = min(seconds, _seconds(method, large))
    return {"extra_bytes": extra, "seconds": seconds, "base_seconds": base_seconds}


def _call(method: str, lens: np.ndarray) -> Any:
    if method == "build_plan":
        return build_plan(lens, LEVELS, NUM_RANKS, NUM_MICROBATCHES)
    return pack(lens, CAPS[-1], method)


def _seconds(method: str, lens: np.ndarray) -> float:
    start = time.perf_counter()
    result = _call(method, lens)
    taken = time.perf_counter() - start
    del result
    return taken


def _status(field: str) -> int:
    """Bytes, from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))))
