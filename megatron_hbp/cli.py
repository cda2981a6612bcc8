"""The command line: hbp prepare | plan | audit.

Guarantees (asserted by tests/unit/test_cli.py):
- results go to stdout, one error line to stderr (and progress, with --compare);
- exit code 0: done; 1: `audit` found a violation; 2: wrong use, with what is wrong, the rule and a
  way out on one line.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from megatron_hbp.alignment import alignment
from megatron_hbp.audit import array_hash
from megatron_hbp.config import (
    MIXING_MODES,
    OVERLONG_POLICIES,
    PACKERS,
    PLAN_DEFAULTS,
    HbpConfig,
    field_docs,
)
from megatron_hbp.corpus.command import add_command as add_prepare
from megatron_hbp.corpus.store import Corpus
from megatron_hbp.cost import PackCost
from megatron_hbp.level import Level
from megatron_hbp.packing import check_lengths
from megatron_hbp.plan import Plan
from megatron_hbp.planner import build_plan
from megatron_hbp.report.compare import compare_plan, compare_text
from megatron_hbp.report.text import plan_document, plan_text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        parser = _root_parser()
        subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
        add_prepare(subparsers)
        _add_plan(subparsers)
        _add_audit(subparsers)
        namespace = parser.parse_args(argv)
        return namespace.func(namespace)
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split()).replace("--hbp-", "--")
        print(f"hbp: error: {message}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage, so that every error is one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _root_parser() -> argparse.ArgumentParser:
    return _Parser(prog="hbp", description="Hierarchical balance packing for Megatron-LM.")


@dataclass(frozen=True)
class _Input:
    """What a plan is made from. seq_lens, first_trained, source_ids: see build_plan()."""

    seq_lens: np.ndarray
    first_trained: np.ndarray | None = None
    source_ids: np.ndarray | None = None
    corpus_hash: str | None = None
    corpus_path: str | None = None


def _add_plan(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("plan", help="plan every step of a run from lengths or a corpus")
    docs = field_docs(HbpConfig)
    _add_input(parser, required=True)
    parser.add_argument(
        "--level",
        action="append",
        required=True,
        metavar="PACK_LEN:CP[:RECOMPUTE]",
        help=docs["level"],
    )
    parser.add_argument(
        "--ranks", type=int, required=True, metavar="N", help="world size / (TP x PP)"
    )
    parser.add_argument(
        "--microbatches", type=int, default=1, metavar="N", help="per step (default 1)"
    )
    parser.add_argument(
        "--stages", type=int, default=1, metavar="N", help="pipeline stages (default 1)"
    )
    parser.add_argument(
        "--virtual-stages",
        type=int,
        default=1,
        metavar="N",
        help="model chunks of a stage; micro-batches must be a multiple of the stages (default 1)",
    )
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
        help="how often an epoch takes each sequence of source 0; repeat for source 1, 2, ... "
        "(default: once each)",
    )
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="tensor-parallel size (default 1)"
    )
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="the run uses Megatron's --sequence-parallel",
    )
    parser.add_argument(
        "--fp8-recipe",
        metavar="NAME",
        help="the run's FP8 recipe: delayed, tensorwise, mxfp8 or blockwise (default none)",
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
    parser.set_defaults(func=_plan, **PLAN_DEFAULTS)


def _plan(namespace: argparse.Namespace) -> int:
    levels = tuple(Level.parse(text) for text in namespace.level)
    given = _read_input(namespace)
    assert given is not None  # argparse requires one
    if namespace.tp < 1:
        raise ValueError(f"--tp is {namespace.tp}; it must be at least 1")
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
        alignment=alignment(
            tuple(level.cp_size for level in levels),
            tp_size=namespace.tp,
            sequence_parallel=namespace.sequence_parallel,
            fp8_recipe=namespace.fp8_recipe,
        ),
        first_trained=given.first_trained,
        source_ids=given.source_ids,
        corpus_hash=given.corpus_hash,
        corpus_path=given.corpus_path,
    )
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


def _add_audit(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "audit", help="check every invariant of a plan; exit code 1 when one is violated"
    )
    parser.add_argument("plan", metavar="PLAN", help="the folder of the plan")
    _add_input(parser, required=False)
    parser.set_defaults(func=_audit)


def _audit(namespace: argparse.Namespace) -> int:
    given = _read_input(namespace)
    if not (Path(namespace.plan) / "plan.json").is_file():
        raise ValueError(
            f"{namespace.plan} holds no plan.json; name a folder made by hbp plan --output"
        )
    try:
        plan = Plan.load(namespace.plan)
    except ValueError as error:
        print(error)
        return 1
    problems = plan.audit(None if given is None else given.seq_lens)
    if given is not None and given.corpus_hash is not None:
        problems += _corpus_problems(plan, given)
    for problem in problems:
        print(problem)
    if not problems:
        print(
            f"good: {plan.num_steps} steps, {plan.num_packs} packs, "
            f"{plan.counts()['sequences_kept']} sequences, hash {plan.hash()[:12]}"
        )
    return 1 if problems else 0


def _corpus_problems(plan: Plan, given: _Input) -> list[str]:
    """What only the corpus can tell: whether it is the plan's, and every sequence trains."""
    problems = []
    if plan.corpus_hash not in (None, given.corpus_hash):
        problems.append(
            f"the plan was made from corpus {plan.corpus_hash}, this one is {given.corpus_hash}"
        )
    first_trained = given.first_trained
    if first_trained is None or len(first_trained) != len(plan.seq_lens):
        return problems
    if plan.first_trained_hash not in (None, array_hash(first_trained)):
        problems.append("the plan was made from another mask (first_trained_hash differs)")
    untrained = np.flatnonzero((plan.seq_lens > 0) & (first_trained >= plan.seq_lens))
    if len(untrained):
        problems.append(
            f"{len(untrained)} kept sequences have no trained token {untrained[:5].tolist()}"
        )
    return problems


def _add_input(parser: argparse.ArgumentParser, *, required: bool) -> None:
    source = parser.add_mutually_exclusive_group(required=required)
    source.add_argument("--corpus", metavar="DIR", help="a corpus made by hbp prepare")
    source.add_argument(
        "--lengths",
        metavar="FILE.npy",
        help="an int32 or int64 array, one length in tokens per sequence",
    )
    parser.add_argument(
        "--sources",
        metavar="FILE.npy",
        help="with --lengths: an int32 or int64 array, the source (0 or more) of each sequence",
    )


def _read_input(namespace: argparse.Namespace) -> _Input | None:
    if namespace.sources is not None and namespace.lengths is None:
        raise ValueError("--sources goes with --lengths; a corpus knows its sources")
    if namespace.corpus is not None:
        corpus = Corpus.open(namespace.corpus)
        return _Input(
            corpus.seq_lens,
            corpus.first_trained,
            corpus.source_ids,
            corpus.hash,
            str(Path(namespace.corpus).resolve()),
        )
    if namespace.lengths is None:
        return None
    seq_lens = _load_array("--lengths", namespace.lengths)
    if namespace.sources is None:
        return _Input(seq_lens)
    return _Input(seq_lens, source_ids=_load_array("--sources", namespace.sources))


def _load_array(flag: str, path: str) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"{flag} {path} cannot be read ({error}); make it with "
            "numpy.save(file, a), a being a one-dimensional int32 or int64 array"
        ) from None
    check_lengths(array, f"{flag} {path}")
    return array
