"""`hbp plan`: lengths or a corpus in, a plan out."""

import argparse
import dataclasses
import json
import sys

from megatron_hbp.commands.given import add_input, read_input
from megatron_hbp.commands.layout import add_layout, given_levels, run_alignment
from megatron_hbp.config import (
    MIXING_MODES,
    OVERLONG_POLICIES,
    PACKERS,
    PLAN_DEFAULTS,
    HbpConfig,
    field_docs,
)
from megatron_hbp.cost import PackCost
from megatron_hbp.kept import SequenceError, where_from
from megatron_hbp.planner import build_plan
from megatron_hbp.report.compare import compare_plan, compare_text
from megatron_hbp.report.text import plan_document, plan_text


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser("plan", help="plan every step of a run from lengths or a corpus")
    docs = field_docs(HbpConfig)
    add_input(parser, required=True)
    add_layout(parser, from_plan=False)
    parser.add_argument("--epochs", type=int, metavar="N", help="epochs in the plan (default 1)")
    for name in ("seed", "curriculum_steps"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=docs[name])
    parser.add_argument("--max-mixing", type=float, metavar="RATIO", help=docs["max_mixing"])
    for name, choices in (
        ("packer", PACKERS),
        ("mixing", MIXING_MODES),
        ("overlong", OVERLONG_POLICIES),
    ):
        parser.add_argument(f"--{name}", choices=choices, help=docs[name])
    parser.add_argument(
        "--cost",
        metavar="TERM=NUMBER[,...]",
        help="what balances packs: fixed, linear, quadratic per sequence, token, squared length; "
        "communication per token where CP is above 1 (default: quadratic=1)",
    )
    parser.add_argument(
        "--source-weight",
        action="append",
        type=float,
        metavar="W",
        help="how often an epoch takes each sequence of source 0 (of the first --corpus); repeat "
        "for source 1, 2, ... (default: once each)",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="where the plan is saved (default: it is not)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="print every metric of the plan beside those of single-level packing, random and "
        "sorted batching, levels without balancing and online scheduling, each with its bound",
    )
    parser.set_defaults(func=run, **PLAN_DEFAULTS)


def run(namespace: argparse.Namespace) -> int:
    levels = given_levels(namespace)
    given = read_input(namespace, namespace.source_weight)
    assert levels is not None  # argparse requires both
    assert given is not None
    try:
        plan = build_plan(
            given.seq_lens,
            levels,
            namespace.ranks,
            namespace.microbatches,
            namespace.stages,
            num_virtual_stages=namespace.virtual_stages,
            cost=None if namespace.cost is None else _parse_cost(namespace.cost),
            source_weights=namespace.source_weight,
            **{name: getattr(namespace, name) for name in PLAN_DEFAULTS},
            alignment=run_alignment(namespace, levels),
            first_trained=given.first_trained,
            source_ids=given.source_ids,
            corpus_hash=given.corpus_hash,
            corpus_paths=given.corpus_paths,
        )
    except SequenceError as error:
        raise ValueError(where_from(error, given.origin)) from None
    if namespace.output is not None:
        plan.save(namespace.output)
    compared = compare_plan(plan, _progress) if namespace.compare else None
    if namespace.json:
        document = plan_document(plan, given.seq_lens) | {"output": namespace.output}
        if compared is not None:
            document["compare"] = compared
        print(json.dumps(document, indent=2))
        return 0
    print(plan_text(plan, given.seq_lens))
    if compared is not None:
        print("\n" + compare_text(compared))
    if namespace.output is not None:
        print(f"\nsaved in {namespace.output}")
    return 0


def _progress(text: str) -> None:
    print(f"hbp: {text}", file=sys.stderr, flush=True)


def _parse_cost(text: str) -> PackCost:
    names = [field.name for field in dataclasses.fields(PackCost)]
    terms = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            terms[name] = float(number)
        except ValueError:
            terms = {}
        if name not in names or name not in terms:
            raise ValueError(
                f"--cost {text} is no list of TERM=NUMBER; terms are {', '.join(names)}, e.g. "
                "--cost linear=1,quadratic=2e-5"
            )
    return PackCost(**terms)
