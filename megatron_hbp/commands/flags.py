"""`hbp flags`: a recipe's flags as the words of a command line, one a line, for launch scripts.

    mapfile -t FLAGS < <(hbp flags examples/recipes/llama-3.1-8b.toml --gpus 32)
    torchrun ... -m megatron_hbp.host.pretrain_gpt "${FLAGS[@]}"

Guarantees (asserted by tests/unit/test_flags_command.py):
- what is printed is what `hbp check` and `hbp rehearse` work with;
- a number of GPUs that ranks or the global batch do not fit is an error before anything starts;
- a word that a line cannot hold is an error.
Everything else about the flags is for `hbp check` to say.
"""

import argparse

from megatron_hbp.commands.recipe import GivenRun, add_run, given_run

_SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "flags",
        help="print a recipe's flags, for a launch script",
        description="Prints the words of the command line, one a line.",
    )
    add_run(parser)
    parser.set_defaults(func=run)


def run(namespace: argparse.Namespace) -> int:
    given = given_run(namespace)
    _check_gpus(given)
    for word in given.words:
        if not word or "\n" in word:
            raise ValueError(f"{word!r} cannot be a line of its own; give flags without line ends")
        print(word)
    return 0


def _check_gpus(given: GivenRun) -> None:
    """Raises ValueError unless the GPUs make whole ranks, and these whole micro-batches."""
    gpus = given.recipe.gpus
    tp_size, num_stages = (_number(given.words, flag) or 1 for flag in _SIZES)
    if gpus % (tp_size * num_stages):
        raise ValueError(
            f"{gpus} GPUs are no multiple of TP {tp_size} x {num_stages} stages; give --gpus "
            f"{-(-gpus // (tp_size * num_stages)) * tp_size * num_stages}, or other sizes after --"
        )
    num_ranks = gpus // (tp_size * num_stages)
    batch = _number(given.words, "--global-batch-size")
    if batch is not None and batch % num_ranks:
        raise ValueError(
            f"--global-batch-size {batch} is no multiple of the {num_ranks} ranks that {gpus} GPUs "
            f"make; add -- --global-batch-size {-(-batch // num_ranks) * num_ranks}"
        )


def _number(words: list[str], flag: str) -> int | None:
    """The last value of a flag, None where there is none that is a number above 0."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else following
    return int(found) if found is not None and found.isdecimal() and int(found) else None
