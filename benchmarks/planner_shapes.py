"""Other length distributions than tulu: no slow case, and no decreasing method worse than FFD."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import planner_peers
from benchmarks.planner_figures import Figure, Row, at_most, shown
from benchmarks.planner_speed import CAPS, LEVELS, NUM_MICROBATCHES, NUM_RANKS, NUM_SEQUENCES
from benchmarks.planner_timing import best_times
from benchmarks.planner_workloads import Workloads
from megatron_hbp import build_plan
from megatron_hbp.packing import pack

NAMES = ("uniform32k", "half_plus", "identical", "ffd_worst", "real")
MAX_SLOWDOWN = 3.0
_TIMED = ("best_fit", "best_fit_decreasing")
_DECREASING = ("best_fit_decreasing", "first_fit_decreasing")
_ROUNDS = 3


def shapes(workloads: Workloads) -> Row:
    figures: list[Figure] = []
    first_fit_by = ""
    for cap in CAPS:
        lens = {name: _fitting(workloads, name, cap) for name in ("tulu", *NAMES)}
        figures += _times(lens, cap)
        for name in NAMES:
            first_fit, first_fit_by = _first_fit_decreasing(lens[name], cap)
            most = max(len(pack(lens[name], cap, method)[1]) - 1 for method in _DECREASING)
            large = int(np.count_nonzero(lens[name] * 2 > cap))
            bound = max(-(-int(lens[name].sum()) // cap), large)
            label = f"{name}, cap {cap}: packs, decreasing"
            figures.append(at_most(label, most, first_fit, ".0f", bound))
    return Row(
        "workloads",
        f"{NUM_SEQUENCES} sequences of other distributions",
        figures,
        [
            f"time: a sequence's, over that of tulu in the same turns, best of {_ROUNDS}; longer "
            "ones left out",
            "packs: the most of best_fit_decreasing and first_fit_decreasing; bar: first-fit "
            f"decreasing by {first_fit_by}",
            "bound: the larger of tokens / cap and the sequences over half of cap",
        ],
    )


def _fitting(workloads: Workloads, name: str, cap: int) -> np.ndarray:
    lens = workloads.lengths(name, NUM_SEQUENCES, cap)
    return lens if lens.max() <= cap else lens[lens <= cap]


def _times(lens: dict[str, np.ndarray], cap: int) -> list[Figure]:
    methods: dict[str, Callable[[np.ndarray], Any]] = {
        method: lambda given, method=method: pack(given, cap, method) for method in _TIMED
    }
    if cap == LEVELS[-1].pack_len:
        methods["build_plan"] = lambda given: build_plan(given, LEVELS, NUM_RANKS, NUM_MICROBATCHES)
    figures = []
    for method, call in methods.items():
        calls = {name: lambda given=given, call=call: call(given) for name, given in lens.items()}
        seconds, _ = best_times(calls, _ROUNDS)
        each = {name: taken / len(lens[name]) for name, taken in seconds.items()}
        for name in NAMES:
            slowdown = each[name] / each["tulu"]
            label = f"{name}, cap {cap}: {method}"
            if method == "build_plan":  # its time grows with the packs, half_plus has 24 x tulu's
                figures.append(shown(label, slowdown, ".2f x"))
            else:
                figures.append(at_most(label, slowdown, MAX_SLOWDOWN, ".2f x"))
    return figures


def _first_fit_decreasing(lens: np.ndarray, cap: int) -> tuple[int, str]:
    """Packs, and whose."""
    for peer in planner_peers.peers():
        if peer.name == "lightbinpack ffd":
            return peer.count(peer.run(peer.convert(lens), cap)), peer.name
    packs = len(pack(lens, cap, "first_fit_decreasing")[1]) - 1
    return packs, "ours, which the tests hold equal to their reference"
