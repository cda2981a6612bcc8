"""`hbp report`: a plan as one self-contained HTML page."""

import argparse
import sys
from pathlib import Path

from megatron_hbp.commands.model import GivenModel, add_model, given_model, names_model
from megatron_hbp.plan import Plan

# What times are predicted for where the user names nothing; the page says so.
_ASSUMED = {"model": "llama-3.1-8b", "device": "h100-80gb"}


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "report", help="make a page that shows what a plan does, saves and takes"
    )
    parser.add_argument("plan", metavar="PLAN", help="the folder of the plan")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="PAGE.html",
        help="where the page is written; an older page there is replaced, another file never",
    )
    add_model(parser, from_plan=True)
    parser.add_argument(
        "--step-log",
        metavar="DIR",
        help="the files of --hbp-step-log: show measured beside predicted times",
    )
    parser.add_argument(
        "--no-pareto",
        action="store_true",
        help="leave out the search over other packers, levels and mixing modes",
    )
    parser.set_defaults(func=run)


def run(namespace: argparse.Namespace) -> int:
    # jinja2 is not needed by the other commands, and slow to import
    from megatron_hbp.report.page import check_output, page_html, write_page  # noqa: PLC0415

    output = Path(namespace.output)
    check_output(output)
    plan = Plan.load(namespace.plan)
    given, assumed = _given(namespace, plan)
    html = page_html(
        plan,
        given.cost,
        assumed=assumed,
        step_log=namespace.step_log,
        front=not namespace.no_pareto,
        progress=_progress,
    )
    write_page(output, html)
    print(f"{output}: {len(html.encode()) / 1e6:.1f} MB, plan {plan.hash()[:12]}")
    return 0


def _given(namespace: argparse.Namespace, plan: Plan) -> tuple[GivenModel, list[str]]:
    """The cost model, and sentences about where it comes from."""
    if not names_model(namespace):
        vars(namespace).update(_ASSUMED)
        names = " on ".join(_ASSUMED.values())
        return given_model(namespace, plan), [
            f"No model was named, so times are those of {names}; name yours with --model and "
            "--device, or give a --profile."
        ]
    given = given_model(namespace, plan)
    if given.profile is None:
        return given, []
    return given, [f"Fitted to {len(given.profile.points)} measured points of {namespace.profile}."]


def _progress(text: str) -> None:
    print(f"hbp: {text}", file=sys.stderr, flush=True)
