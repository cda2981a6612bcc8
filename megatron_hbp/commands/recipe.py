"""What `hbp check` and `hbp flags` are told of the run: a recipe, Megatron flags, or both.

    hbp check examples/recipes/llama-3.1-8b.toml --gpus 64 -- --global-batch-size 512
    hbp check --gpus 64 --device h100-80gb -- --num-layers 32 ...

Guarantees (asserted by tests/unit/test_command_recipe.py): flags after `--` win over the recipe's.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_hbp.hardware import DEVICES
from megatron_hbp.recipe import Recipe, read_recipe, with_gpus

FLAGS = "-- <Megatron flags>"


@dataclass(frozen=True)
class GivenRun:
    """recipe: without flags of its own where only flags were given. words: the command line."""

    recipe: Recipe
    words: list[str]


def add_run(parser: argparse.ArgumentParser) -> None:
    """RECIPE, --gpus, and flags after `--`, which cli.py hands over as `flags`."""
    parser.usage = f"{parser.prog} [RECIPE] [options] [{FLAGS}]"
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a recipe, see examples/README.md"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of the whole run (default: the recipe's)"
    )
    parser.set_defaults(takes_flags=True)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """What a recipe says of the cluster, for another one or without a recipe."""
    parser.add_argument(
        "--device",
        metavar="NAME|FILE",
        help=f"one of {', '.join(DEVICES)}, or a JSON file (default: the recipe's)",
    )
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="(default: the recipe's, or 8)"
    )
    parser.add_argument(
        "--transformer-engine",
        metavar="RELEASE",
        help="the release that the cluster has (default: the recipe's, or 2.8)",
    )


def given_run(namespace: argparse.Namespace) -> GivenRun:
    """Raises ValueError when neither a recipe nor flags are given, or something is missing."""
    more: list[str] = namespace.flags
    if namespace.recipe is None and not more:
        raise ValueError(f"neither a RECIPE nor {FLAGS} is given; give one of them, or both")
    if more and not more[0].startswith("--"):
        raise ValueError(f"{more[0]!r} after -- is no flag; write {FLAGS}")
    if namespace.recipe is None:
        recipe = Recipe(
            name="flags", path=Path(), title="", gpus=_gpus(namespace.gpus), device="", flags={}
        )
    else:
        recipe = with_gpus(read_recipe(namespace.recipe), namespace.gpus)
    changes = {
        name: value
        for name in ("device", "gpus_per_node", "transformer_engine")
        if (value := getattr(namespace, name, None)) is not None
    }
    recipe = replace(recipe, **changes)
    if recipe.gpus_per_node < 1:
        raise ValueError(f"--gpus-per-node is {recipe.gpus_per_node}; it must be at least 1")
    return GivenRun(recipe, recipe.command_line(more))


def _gpus(given: int | None) -> int:
    if given is None:
        raise ValueError("--gpus is missing; give the number of GPUs of the run, or a RECIPE")
    if given < 1:
        raise ValueError(f"--gpus is {given}; give a whole number of 1 or more")
    return given
