"""`make pareto`: what mixing costs a pipeline, and what balance, padding and CP cost other methods.

python -m benchmarks.planner_pareto [--json FILE] [--figures DIR] [--workloads DIR] [--from FILE]
Plans tulu (1M sequences) and tulu_paper for several numbers of pipeline stages, over mixing modes
and --max-mixing, beside every method of baselines.py and online.py. Prints tables and draws
docs/planner_pareto.svg and docs/planner_metrics.svg; the same code gives the same bytes.
Ends with 2 for wrong use.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_bench import machine, machine_text
from benchmarks.planner_pareto_figures import draw_metrics, draw_pareto, one_stage
from benchmarks.planner_speed import LEVELS, NUM_MICROBATCHES, NUM_RANKS, NUM_SEQUENCES
from benchmarks.planner_workloads import Workloads
from megatron_hbp import build_plan
from megatron_hbp.baselines import next_fit, plan_placement, single_level, unbalanced_levels
from megatron_hbp.cost import DENSE_8B_H100
from megatron_hbp.metrics import placement_metrics
from megatron_hbp.online import schedule_online
from megatron_hbp.placement import Placement
from megatron_hbp.report.text import table

_CHECKOUT = Path(__file__).resolve().parents[1]
WORKLOADS = {"tulu": NUM_SEQUENCES, "tulu_paper": 0}
STAGES = (1, 4, 8, 16)
MAX_MIXING = (0.0, 8.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.25, 1.0)  # 0: no bound
# by column of the tables: name in the metrics, how it is printed
METRICS = {
    "ABR": ("attention_balance_ratio", ".4f"),
    "CR": ("communication_ratio", ".4f"),
    "PR": ("padding_ratio", ".4f"),
    "Ave-T": ("tokens_per_rank", ".0f"),
    "eff.": ("modelled_efficiency", ".4f"),
}
_OF_STAGES = (("mixing_ratio", ".2f"), ("pipeline_stretch", ".3f"), ("time_over_bound", ".3f"))
_NO_LOCKSTEP = "online, no lockstep"


def measure(workloads: Workloads) -> dict[str, Any]:
    """By workload: its bounds, and a list of points.

    A point: method (auto, step, microbatch or a baseline), max_mixing (None where it has none),
    stages, and all numbers that are shown.
    """
    found: dict[str, Any] = {}
    for name, num in WORKLOADS.items():
        lens = workloads.lengths(name, num)
        points = [*_plan_points(lens), *_baseline_points(lens)]
        bounds = {key: points[0][f"{key}_bound"] for key, _ in METRICS.values()}
        found[name] = {"sequences": len(lens), "bounds": bounds, "points": points}
    return found


def _plan_points(lens: np.ndarray) -> Iterator[dict[str, Any]]:
    for stages in STAGES:
        settings = [("microbatch", 0.0)]
        for mode in ("auto", "step"):
            settings += [(mode, most) for most in (MAX_MIXING if stages > 1 else (0.0,))]
        for mode, most in settings:
            try:
                plan = build_plan(
                    lens, LEVELS, NUM_RANKS, NUM_MICROBATCHES, stages, mixing=mode, max_mixing=most
                )
            except ValueError:
                continue  # the bound is out of reach
            yield {"method": mode, "max_mixing": most, **_numbers(plan_placement(plan), stages)}


def _baseline_points(lens: np.ndarray) -> Iterator[dict[str, Any]]:
    for name, method in _baselines(lens).items():
        placement = method()
        for stages in STAGES:
            # a pipeline keeps ranks in step, so without lockstep there is one stage
            if stages == 1 or name != _NO_LOCKSTEP:
                numbers = _numbers(placement, stages, lockstep=name != _NO_LOCKSTEP)
                yield {"method": name, "max_mixing": None, **numbers}


def _baselines(lens: np.ndarray) -> dict[str, Callable[[], Placement]]:
    level, shape = LEVELS[-1], (NUM_RANKS, NUM_MICROBATCHES)
    budget = level.tokens_per_rank

    def packed(packer: str) -> Callable[[], Placement]:
        return lambda: single_level(lens, level, *shape, packer=packer)

    def laid_out(order: str) -> Callable[[], Placement]:
        return lambda: next_fit(lens, level, *shape, order=order)

    return {
        "levels, unbalanced": lambda: unbalanced_levels(lens, LEVELS, *shape),
        "one level, in order": laid_out("input"),
        "one level, random": laid_out("random"),
        "one level, isf": packed("isf"),
        "one level, best_fit": packed("best_fit"),
        "one level, ffd": packed("first_fit_decreasing"),
        "one level, bfd": packed("best_fit_decreasing"),
        "one level, sorted": laid_out("ascending"),
        "online": lambda: schedule_online(lens, budget, *shape),
        _NO_LOCKSTEP: lambda: schedule_online(lens, budget, *shape, barrier="step"),
    }


def _numbers(placement: Placement, stages: int, lockstep: bool = True) -> dict[str, Any]:
    """The metrics that are shown, their bounds, and the modelled time of the epoch over its bound.

    A step takes sum t + (stages - 1) max t, t being the time of a micro-batch's slowest rank;
    without lockstep, the time of the rank that is busiest in the step. No plan is faster than all
    work and the communication of sequences over S, spread evenly.
    """
    metrics = placement_metrics(placement, stages)
    lens = placement.seq_lens[placement.sequence_ids].astype(np.int64)
    times = placement.rank_sums(
        DENSE_8B_H100.per_rank(
            np.diff(placement.pack_offsets),
            placement.pack_sums(lens),
            placement.pack_sums(lens * lens),
            placement.pack_cp,
        )
    )
    if lockstep:
        slowest = times.max(axis=1)
        peaks = np.maximum.reduceat(slowest, placement.step_offsets[:-1])
        taken = slowest.sum() + (stages - 1) * peaks.sum()
    else:
        taken = placement.step_sums(times).max(axis=1).sum()
    least = _least_rank_time(lens) * (NUM_MICROBATCHES + stages - 1) / NUM_MICROBATCHES
    keys = [key for key, _ in METRICS.values()]
    if not lockstep:
        for key in keys:
            metrics[key] = metrics.get(f"{key}_step", metrics[key])
    return {
        "stages": stages,
        **{key: metrics[key] for key in keys},
        **{f"{key}_bound": metrics[f"{key}_bound"] for key in keys},
        "mixing_ratio": metrics["mixing_ratio"],
        "pipeline_stretch": metrics["pipeline_stretch"] if lockstep else 1.0,
        "time_over_bound": float(taken / least),
    }


def _least_rank_time(lens: np.ndarray) -> float:
    """Seconds of each rank for the epoch if all do equally much and only long sequences pay."""
    ones, squares = np.ones(len(lens)), lens.astype(np.float64) ** 2
    sent = DENSE_8B_H100.communication * lens[lens > LEVELS[0].pack_len].sum()
    return float((DENSE_8B_H100.work(ones, lens, squares).sum() + sent) / NUM_RANKS)


def tables_text(found: dict[str, Any]) -> str:
    parts = []
    for name, here in found.items():
        title = (
            f"{name}, {here['sequences']} sequences, {NUM_RANKS} ranks, {NUM_MICROBATCHES} "
            f"micro-batches, levels {' '.join(map(str, LEVELS))}"
        )
        parts += [title, _metrics_table(here), _stages_table(here)]
    return "\n\n".join(parts)


def _metrics_table(here: dict[str, Any]) -> str:
    """What does not depend on pipeline stages: a row for each method."""
    rows: list[list[str | int | float]] = [["", *METRICS]]
    for point in one_stage(here):
        rows.append([point["method"], *(f"{point[key]:{form}}" for key, form in METRICS.values())])
    bounds = (f"{here['bounds'][key]:{form}}" for key, form in METRICS.values())
    return table([*rows, ["bound", *bounds]])


def _stages_table(here: dict[str, Any]) -> str:
    """For each method and --max-mixing, by stages: mixing, stretch and time over its bound."""
    rows: dict[tuple[str, float | None], dict[int, dict[str, Any]]] = {}
    for point in here["points"]:
        rows.setdefault((point["method"], point["max_mixing"]), {})[point["stages"]] = point
    head: list[str | int | float] = ["stages"]
    for stages in STAGES:
        head += [f"{stages}: mix", "str.", "time"]
    lines = [head]
    for (method, most), by_stages in rows.items():
        line: list[str | int | float] = [method + (f" {most:g}" if most else "")]
        for stages in STAGES:
            point = by_stages.get(stages)
            line += [f"{point[key]:{form}}" if point else "-" for key, form in _OF_STAGES]
        lines.append(line)
    return table([*lines, ["bound", *["0", "1", "1"] * len(STAGES)]])


def main() -> int:
    parser = argparse.ArgumentParser(description="The trade-offs of a plan, as tables and figures.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all numbers in this file")
    parser.add_argument(
        "--from", dest="kept", type=Path, metavar="FILE", help="draw the numbers kept in this file"
    )
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        default=_CHECKOUT / "docs",
        help="the folder of the two figures (default: docs)",
    )
    parser.add_argument(
        "--workloads",
        type=Path,
        metavar="DIR",
        default=_CHECKOUT.parent / "shared" / "bench",
        help="the folder of workloads.py (default: ../shared/bench beside the checkout)",
    )
    options = parser.parse_args()
    try:
        if options.kept is not None:
            document = json.loads(options.kept.read_text(encoding="utf-8"))
        else:
            about = machine()
            document = {"machine": about, "workloads": measure(Workloads(options.workloads))}
    except (OSError, ValueError) as error:
        print(f"pareto: {error}", file=sys.stderr)
        return 2
    print(f"{machine_text(document['machine'])}\n\n{tables_text(document['workloads'])}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    pareto, metrics = (options.figures / f"planner_{name}.svg" for name in ("pareto", "metrics"))
    draw_pareto(document["workloads"], pareto)
    draw_metrics(document["workloads"], metrics)
    print(f"{pareto}\n{metrics}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
