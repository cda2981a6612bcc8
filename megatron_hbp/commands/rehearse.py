"""`hbp rehearse`: a recipe scaled down, trained on a few CPU processes, killed and resumed.

Guarantees (asserted by tests/host/test_rehearse.py):
- exit code 0: passed; 1: a run failed or the verdict found a problem, with the end of a log and
  where the files are; 2: wrong use, before anything is started;
- nothing is left behind but the folder that --output names.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_hbp.recipe import Recipe, read_recipe
from megatron_hbp.rehearsal.launcher import RehearsalError
from megatron_hbp.rehearsal.rehearse import Rehearsal, rehearse, write_data
from megatron_hbp.rehearsal.scale import FEWEST_STEPS, Scaled, scale
from megatron_hbp.rehearsal.scale_layout import MOST_PROCESSES


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "rehearse",
        help="train a recipe, scaled down, on a few CPU processes; kill it and resume it",
        epilog="Flags after -- win over the recipe's: hbp rehearse RECIPE -- --moe-z-loss-coeff 0",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe, e.g. examples/recipes/X.toml")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help=f"at most so many processes, 1 to {MOST_PROCESSES} (default {MOST_PROCESSES})",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=8,
        metavar="N",
        help=f"about so many steps, {FEWEST_STEPS} or more (default 8)",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="keep logs, corpora, plan and checkpoints there (default: a temporary folder, kept "
        "when the rehearsal fails)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(func=run, takes_flags=True)


def run(namespace: argparse.Namespace) -> int:
    if namespace.processes is not None and not 1 <= namespace.processes <= MOST_PROCESSES:
        raise ValueError(
            f"--processes is {namespace.processes}; give 1 to {MOST_PROCESSES}, or leave it out"
        )
    recipe = read_recipe(namespace.recipe)
    more: Sequence[str] = namespace.flags
    scaled = scale(recipe, more, num_steps=namespace.steps, num_processes=namespace.processes)
    folder = _folder(namespace.output)
    say = (lambda text: None) if namespace.json else (lambda text: print(text, flush=True))
    keep = namespace.output is not None
    try:
        write_data(recipe, scaled, folder)
        _describe(recipe, scaled, say)
        (folder / "flags.txt").write_text("\n".join(scaled.command_line(folder)) + "\n")
        rehearsal = None
        try:
            rehearsal = rehearse(scaled, folder, say)
            problems = rehearsal.verdict.problems
        except RehearsalError as error:
            problems = [str(error)]
        keep = keep or bool(problems)
        kept = folder if keep else None
        if namespace.json:
            print(json.dumps(_document(recipe, scaled, kept, rehearsal, problems), indent=2))
        else:
            print(_text(scaled, rehearsal, problems, kept))
        return 1 if problems else 0
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _folder(output: str | None) -> Path:
    """An empty folder. Raises ValueError when it is not."""
    if output is None:
        return Path(tempfile.mkdtemp(prefix="hbp-rehearse-"))
    folder = Path(output).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--output {output} is there already; name a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _describe(recipe: Recipe, scaled: Scaled, say: Any) -> None:
    places = scaled.places
    say(f"{recipe.name}: {recipe.title}")
    say(
        f"{recipe.gpus} GPUs -> {places.num_processes} CPU processes: TP {places.tp_size}, "
        f"{places.num_stages} stages x {places.num_virtual_stages} virtual, {places.num_ranks} "
        f"ranks, EP {places.ep_size}, {places.num_microbatches} micro-batches a step, levels "
        f"{' '.join(map(str, scaled.levels_before))} -> {' '.join(map(str, scaled.levels))}"
    )
    say(f"{len(scaled.changes)} flags are changed, all others are the recipe's:")
    for change in scaled.changes:
        say(f"  {change}")


def _text(
    scaled: Scaled, rehearsal: Rehearsal | None, problems: list[str], folder: Path | None
) -> str:
    lines = []
    if rehearsal is not None:
        verdict = rehearsal.verdict
        counts = ", ".join(f"CP {cp}: {count}" for cp, count in verdict.microbatches.items())
        repeated = " ".join(map(str, verdict.repeated_steps)) or "none"
        lines += [
            f"steps trained: {verdict.steps} of {verdict.planned_steps}, {verdict.sequences} "
            "sequences",
            f"{'started from weights; ' if scaled.starts_from_weights else ''}"
            f"resumed at step {verdict.resumed_at}; trained twice: steps {repeated}",
            f"micro-batches by CP size: {counts}",
            "loss: " + " ".join(f"{loss:.4f}" for loss in verdict.losses),
        ]
    lines += [f"problem: {problem}" for problem in problems]
    if folder is not None:
        lines.append(f"files: {folder}")
    took = "" if rehearsal is None else f" in {rehearsal.seconds:.0f} s"
    what = ": every sequence as planned, steps trained twice bit-equal"
    return "\n".join([*lines, f"failed{took}" if problems else f"passed{took}{what}"])


def _document(
    recipe: Recipe,
    scaled: Scaled,
    folder: Path | None,
    rehearsal: Rehearsal | None,
    problems: list[str],
) -> dict[str, Any]:
    places = scaled.places
    verdict = None if rehearsal is None else rehearsal.verdict
    return {
        "recipe": str(recipe.path),
        "passed": not problems,
        "problems": problems,
        "folder": None if folder is None else str(folder),
        "seconds": None if rehearsal is None else round(rehearsal.seconds, 1),
        "processes": places.num_processes,
        "layout": {
            "tp": places.tp_size,
            "stages": places.num_stages,
            "virtual_stages": places.num_virtual_stages,
            "ranks": places.num_ranks,
            "ep": places.ep_size,
            "microbatches": places.num_microbatches,
        },
        "starts_from_weights": scaled.starts_from_weights,
        "levels": [str(level) for level in scaled.levels],
        "changes": [
            {"flag": f"--{c.flag}", "from": c.before, "to": c.after, "reason": c.reason}
            for c in scaled.changes
        ],
        "steps": None if verdict is None else verdict.steps,
        "planned_steps": None if verdict is None else verdict.planned_steps,
        "sequences": None if verdict is None else verdict.sequences,
        "resumed_at": None if verdict is None else verdict.resumed_at,
        "repeated_steps": None if verdict is None else verdict.repeated_steps,
        "microbatches_by_cp_size": None if verdict is None else verdict.microbatches,
        "losses": None if verdict is None else verdict.losses,
    }
