"""`hbp simulate`: the predicted time of a plan on a cluster, and where it goes."""

import argparse
import json
from typing import Any

from megatron_hbp.commands.model import GivenModel, add_model, given_model
from megatron_hbp.commands.progress import print_line
from megatron_hbp.plan import Plan
from megatron_hbp.report.simulation import (
    compare_simulated,
    compare_simulated_text,
    comparison_document,
    comparison_text,
    saving_text,
    timeline_document,
    timeline_text,
)
from megatron_hbp.simulate import simulate

_DESCRIPTION = """Predicts every step of a plan: GPU-days, what its time is spent on, who waits for
whom. Nothing is run. Without a --profile the times are computed from the model's shape and the
device's data sheet."""


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "simulate", help="predict the time of a plan on a cluster", description=_DESCRIPTION
    )
    parser.add_argument("plan", metavar="PLAN", help="the folder of the plan")
    add_model(parser, from_plan=True)
    parser.add_argument(
        "--step-log",
        metavar="DIR",
        help="the files of --hbp-step-log of a run of the plan: predicted beside measured",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="predict what the same sequences take with packing at the longest level only, random "
        "and sorted batching, levels without balancing and online scheduling",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(func=run)


def run(namespace: argparse.Namespace) -> int:
    plan = Plan.load(namespace.plan)
    given = given_model(namespace, plan)
    timeline = simulate(plan, given.cost)
    compared = compare_simulated(plan, timeline, print_line) if namespace.compare else None
    measured = None if namespace.step_log is None else timeline.against_log(namespace.step_log)
    if namespace.json:
        document: dict[str, Any] = timeline_document(timeline) | {"fit": _fit(given)}
        if compared is not None:
            document["compare"] = compared
            document["saving"] = saving_text(compared)
        if measured is not None:
            document["measured"] = comparison_document(measured)
        print(json.dumps(document, indent=2))
        return 0
    parts = [timeline_text(timeline), *_fit(given)]
    if compared is not None:
        parts.append(compare_simulated_text(compared))
    if measured is not None:
        parts.append(comparison_text(measured))
    print("\n\n".join(parts))
    return 0


def _fit(given: GivenModel) -> list[str]:
    """How well the cost model fits the profile, in words."""
    return [] if given.fit is None else given.fit.lines()
