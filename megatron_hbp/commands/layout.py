"""What `hbp plan` and `hbp replan` are told about the run: levels, ranks, parallel layout."""

import argparse

from megatron_hbp.alignment import Alignment, alignment
from megatron_hbp.config import HbpConfig, field_docs
from megatron_hbp.level import Level


def add_layout(parser: argparse.ArgumentParser, *, from_plan: bool) -> None:
    """from_plan: what is not given stays as it is in another plan, and is None here."""

    default = None if from_plan else 1
    other = "(default: the plan's)" if from_plan else "(default 1)"
    levels = field_docs(HbpConfig)["level"]
    parser.add_argument(
        "--level",
        action="append",
        required=not from_plan,
        metavar="PACK_LEN:CP[:RECOMPUTE]",
        help=f"{levels} (default: the plan's)" if from_plan else levels,
    )
    parser.add_argument(
        "--ranks", type=int, required=True, metavar="N", help="world size / (TP x PP)"
    )
    parser.add_argument(
        "--microbatches", type=int, default=default, metavar="N", help=f"per step {other}"
    )
    parser.add_argument(
        "--stages", type=int, default=default, metavar="N", help=f"pipeline stages {other}"
    )
    parser.add_argument(
        "--virtual-stages",
        type=int,
        default=default,
        metavar="N",
        help=f"model chunks of a stage; micro-batches must be a multiple of the stages {other}",
    )
    parser.add_argument("--tp", type=int, metavar="N", help="tensor-parallel size (default 1)")
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


def given_levels(namespace: argparse.Namespace) -> tuple[Level, ...] | None:
    """The levels of the command line, None when there are none."""
    return tuple(Level.parse(text) for text in namespace.level) if namespace.level else None


def run_alignment(namespace: argparse.Namespace, levels: tuple[Level, ...]) -> Alignment:
    """The multiples of a run with the flags of add_layout()."""
    tp_size = 1 if namespace.tp is None else namespace.tp
    if tp_size < 1:
        raise ValueError(f"--tp is {tp_size}; it must be at least 1")
    return alignment(
        tuple(level.cp_size for level in levels),
        tp_size=tp_size,
        sequence_parallel=namespace.sequence_parallel,
        fp8_recipe=namespace.fp8_recipe,
    )


def names_alignment(namespace: argparse.Namespace) -> bool:
    """Whether a flag says anything about the multiples of the run."""
    return bool(namespace.tp is not None or namespace.sequence_parallel or namespace.fp8_recipe)
