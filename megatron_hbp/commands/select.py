"""`hbp select`: a model, a cluster and lengths in, the levels to train with out."""

import argparse
import json
from typing import Any

import numpy as np

from megatron_hbp.alignment import alignment
from megatron_hbp.commands.given import add_input, read_input
from megatron_hbp.commands.model import GivenModel, add_model, given_model
from megatron_hbp.histogram import LengthHistogram
from megatron_hbp.paper_levels import PaperSelection, paper_levels
from megatron_hbp.paper_profile import paper_profile
from megatron_hbp.prediction import Prediction, predict
from megatron_hbp.report.selection import (
    paper_document,
    plan_flags,
    predictions_text,
    rejected_text,
    run_flags,
    selection_document,
    terms_text,
)
from megatron_hbp.select import Candidates, Selection, best_levels

METHODS = ("ours", "paper", "both")
_DESCRIPTION = """Chooses token budget, CP sizes and recompute: the levels whose predicted epoch
is shortest for these lengths. Nothing is run. Without a --profile times are computed from the
model's shape and the device's data sheet. GPU-days are those of one epoch."""


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "select",
        help="choose the levels for a model, a cluster and a corpus",
        description=_DESCRIPTION,
    )
    add_input(parser, required=True)
    add_model(parser, from_plan=False)
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="ours",
        help="ours: the fastest levels for these lengths; paper: Algorithms 1, 3 and 4 of the HBP "
        "paper, from the profile (computed without one); both (default ours)",
    )
    parser.add_argument(
        "--tokens-per-step",
        type=int,
        metavar="N",
        help="keep optimizer steps of about N tokens, whatever the token budget: the number of "
        "micro-batches is chosen, too (default: --microbatches of them, so that steps shrink with "
        "the budget)",
    )
    parser.add_argument(
        "--token-budget",
        action="append",
        type=int,
        metavar="S",
        help="tokens per rank and micro-batch to choose from; repeat (default: a grid over what "
        "memory and the lengths allow)",
    )
    parser.add_argument(
        "--cp",
        action="append",
        type=int,
        metavar="N",
        help="CP sizes to choose from; repeat (default: all that ranks and heads allow)",
    )
    parser.add_argument(
        "--fp8-recipe",
        metavar="NAME",
        help="the run's FP8 recipe: delayed, tensorwise, mxfp8 or blockwise (default none)",
    )
    parser.add_argument(
        "--explain", action="store_true", help="print where the time goes and why others lost"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(func=run)


def run(namespace: argparse.Namespace) -> int:
    if namespace.tokens_per_step is not None:
        if namespace.microbatches is not None:
            raise ValueError(
                "--tokens-per-step decides the number of micro-batches; leave --microbatches out"
            )
        # replaced for each budget; virtual stages need a multiple of the stages
        namespace.microbatches = namespace.stages
    given = given_model(namespace)
    lengths = read_input(namespace)
    assert lengths is not None  # argparse requires it
    histogram = LengthHistogram(np.asarray(lengths.seq_lens))
    layout = given.cost.layout
    candidates = Candidates(
        token_budgets=_several(namespace.token_budget),
        cp_sizes=_several(namespace.cp),
        tokens_per_step=namespace.tokens_per_step,
        budget_multiple=alignment(
            (1,),
            tp_size=layout.tp_size,
            sequence_parallel=layout.sequence_parallel,
            fp8_recipe=namespace.fp8_recipe,
        ).budget_multiple,
    )
    ours = best_levels(histogram, given.cost, candidates)
    paper = None if namespace.method == "ours" else _paper(histogram, given)
    if namespace.json:
        print(json.dumps(_document(namespace, given, histogram, ours, paper), indent=2))
    else:
        print(_text(namespace, given, histogram, ours, paper))
    return 0


_Paper = tuple[PaperSelection, Prediction | None, str | None]


def _paper(histogram: LengthHistogram, given: GivenModel) -> _Paper:
    """The paper's levels, their prediction, or why there is none."""
    cost = given.cost
    profile = paper_profile(histogram, cost) if given.profile is None else given.profile
    found = paper_levels(
        profile, num_layers=cost.model.num_layers, memory_bytes=cost.device.memory_bytes
    )
    try:
        return found, predict(found.levels, histogram, cost), None
    except ValueError as error:
        return found, None, str(error)


def _several(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _document(
    namespace: argparse.Namespace,
    given: GivenModel,
    histogram: LengthHistogram,
    ours: Selection,
    paper: _Paper | None,
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "model": given.cost.model.name,
        "device": given.cost.device.name,
        "device_gib": given.cost.device.memory_bytes / 2**30,
        "sequences": histogram.num_sequences,
        "tokens": histogram.num_tokens,
        "longest": histogram.longest,
        "fit": [] if given.fit is None else given.fit.lines(),
        "notes": list(given.cost.notes),
    }
    if namespace.method != "paper":
        document["ours"] = selection_document(ours, given.cost, namespace.fp8_recipe)
    if paper is not None:
        document["paper"] = paper_document(*paper, given.cost, namespace.fp8_recipe)
    return document


def _text(
    namespace: argparse.Namespace,
    given: GivenModel,
    histogram: LengthHistogram,
    ours: Selection,
    paper: _Paper | None,
) -> str:
    cost = given.cost
    layout = cost.layout
    parts = [
        f"{cost.model.name} on {layout.world_size} {cost.device.name}, {layout.num_ranks} ranks; "
        f"{histogram.num_sequences} sequences, {histogram.num_tokens} tokens, the longest "
        f"{histogram.longest}"
    ]
    parts += ["\n".join(lines) for lines in (cost.notes, given.fit and given.fit.lines()) if lines]
    rows: dict[str, Prediction] = {}
    if namespace.method != "paper":
        rows["ours"] = ours.best
    if paper is not None and paper[1] is not None:
        rows["paper"] = paper[1]
    chosen = next(iter(rows.values()), None)
    if ours.static is not None:
        rows["static packing"] = ours.static
    if rows:
        parts.append(predictions_text(rows, cost))
    if paper is not None and paper[1] is None:
        texts = " ".join(map(str, paper[0].levels))
        parts.append(f"the paper's levels, {texts}, cannot be planned: {paper[2]}")
    if ours.static is None:
        parts.append("no single level holds the longest sequence in memory")
    if namespace.explain:
        if rows:
            parts.append(terms_text(rows))
        if paper is not None:
            parts.append("the paper's steps:\n" + "\n".join(paper[0].explanation))
        if namespace.method != "paper":
            parts.append("why the others lost:\n" + rejected_text(ours.rejected))
    if chosen is not None:
        flags = plan_flags(chosen, cost, namespace.fp8_recipe)
        parts.append(f"plan: {flags}\nrun:  {run_flags(chosen)}")
    return "\n\n".join(parts)
