"""The command line: hbp prepare | plan | replan | audit.

Guarantees (asserted by tests/unit/test_cli.py):
- results go to stdout, one error line to stderr (and progress, with --compare);
- exit code 0: done; 1: `audit` found a violation; 2: wrong use, with what is wrong, the rule and a
  way out on one line.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_hbp.commands import audit, plan, prepare, replan


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        parser = _root_parser()
        subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
        for command in (prepare, plan, replan, audit):
            command.add_command(subparsers)
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
