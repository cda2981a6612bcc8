"""`hbp check`: would this run start, fit and stay in lockstep? Asked without a GPU or a network.

A child process does with the host what a start does, at the run's real size (host/preflight.py);
the rest is worked out here (check/).
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from megatron_hbp.check.facts import Facts, Question
from megatron_hbp.check.one_rank import one_rank_document, one_rank_text
from megatron_hbp.check.outcome import conclude
from megatron_hbp.check.report import outcome_document, outcome_text
from megatron_hbp.commands.given import given_lengths
from megatron_hbp.commands.recipe import GivenRun, add_machine, add_run, given_run
from megatron_hbp.hardware import DEVICES, find_device

# Every GPU's groups are lists in memory; 16,384 GPUs take half a minute.
_MOST_GPUS = 2**16

_DESCRIPTION = """Validates the flags as Megatron does at the real number of GPUs, makes all process
groups, builds every pipeline stage without memory, counts parameters, follows every collective of
every rank, and predicts memory. Exit code 0: fits; 1: does not, each reason with a way out; 2:
wrong use."""


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "check",
        help="see that a run starts and fits, without a GPU",
        description=_DESCRIPTION,
    )
    add_run(parser)
    add_machine(parser)
    parser.add_argument(
        "--lengths",
        metavar="FILE",
        help="lengths to plan from where the run's corpus is not here, .npy or .csv (default: the "
        "recipe's)",
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="also show what global rank R does in one step: its groups, packs and collectives",
    )
    parser.add_argument(
        "--step", type=int, default=0, metavar="S", help="that step, from 0 (default 0)"
    )
    parser.add_argument("--strict", action="store_true", help="warnings count as reasons, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(func=run)


def run(namespace: argparse.Namespace) -> int:
    given = given_run(namespace)
    if given.recipe.gpus > _MOST_GPUS:
        raise ValueError(f"--gpus is {given.recipe.gpus}; give at most {_MOST_GPUS}")
    if not given.recipe.device:
        raise ValueError(
            f"--device is missing; give one of {', '.join(DEVICES)}, a JSON file, or a RECIPE"
        )
    device = find_device(given.recipe.device)
    _check_named(given, namespace.rank)
    with tempfile.TemporaryDirectory(prefix="hbp-check-") as folder:
        lengths = namespace.lengths or given.recipe.lengths
        facts = _asked(given, device.compute_capability, lengths, Path(folder))
        found = conclude(given.recipe, device, given.words, facts)
        if namespace.strict:
            found.problems += found.warnings
        shown = None
        planned = found.ranks is not None and found.plan is not None
        if namespace.rank is not None and (planned or found.fits):
            shown = one_rank_document(found, namespace.rank, namespace.step)
        if namespace.json:
            print(json.dumps(outcome_document(found) | {"rank": shown}, indent=2))
        else:
            print(*filter(None, [shown and one_rank_text(shown), outcome_text(found)]), sep="\n")
    return 0 if found.fits else 1


def _check_named(given: GivenRun, rank: int | None) -> None:
    """What can be seen to be wrong without the child."""
    release, gpus = given.recipe.transformer_engine, given.recipe.gpus
    if not re.fullmatch(r"\d+(\.\d+)*([a-z.+].*)?", release):
        raise ValueError(f"--transformer-engine is {release!r}; give a release such as 2.8")
    if rank is not None and not 0 <= rank < gpus:
        raise ValueError(f"--rank is {rank}; the run has ranks 0 to {gpus - 1}")


def _asked(given: GivenRun, capability: float, lengths: str | Path | None, folder: Path) -> Facts:
    """The child's answer. Raises ValueError when it ends without one."""
    array = None
    if lengths is not None:
        array = str(folder / "lengths.npy")
        np.save(array, given_lengths(str(lengths)))
    major = int(capability)
    question = Question(
        flags=given.words,
        gpus=given.recipe.gpus,
        gpus_per_node=given.recipe.gpus_per_node,
        capability=(major, round(10 * (capability - major))),
        transformer_engine=given.recipe.transformer_engine,
        lengths=array,
        workspace=str(folder),
    )
    command = [sys.executable, "-m", "megatron_hbp.host.preflight", str(question.save())]
    # a start of one's own: nothing of a job that this shell may be part of
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "NCCL"))
    }
    done = subprocess.run(command, check=False, env=environment | {"CUDA_VISIBLE_DEVICES": ""})
    facts = Facts.load(folder)
    if facts is None:
        log = folder / "host.log"
        tail = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else []
        raise ValueError(
            f"the check itself failed (exit code {done.returncode}): {' | '.join(tail)}; install "
            "the training extra: pip install 'megatron_hbp[train]'"
        )
    return facts
