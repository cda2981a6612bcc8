"""The command line: hbp prepare | plan | replan | audit | select | simulate | report | check |
rehearse | flags.

Guarantees (asserted by tests/unit/test_cli.py):
- results go to stdout, one error line to stderr (and progress, with --compare);
- exit code 0: done; 1: `audit`, `check` or `rehearse` found that something is wrong; 2: wrong use,
  with what is wrong, the rule and a way out on one line; 130: Ctrl-C; 141:
  whoever read stdout stopped reading, without a word;
- text that the terminal's encoding lacks is printed as escapes.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_hbp.commands import (
    audit,
    check,
    flags,
    plan,
    prepare,
    rehearse,
    replan,
    report,
    select,
    simulate,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    flags_of_host = False
    try:
        parser = _root_parser()
        subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
        for command in (
            prepare,
            plan,
            replan,
            audit,
            select,
            simulate,
            report,
            rehearse,
            check,
            flags,
        ):
            command.add_command(subparsers)
        own, host_flags = _split(sys.argv[1:] if argv is None else argv)
        namespace = parser.parse_args(own)
        flags_of_host = getattr(namespace, "takes_flags", False)
        if host_flags and not flags_of_host:
            raise ValueError(f"this command takes no flags after --: {' '.join(host_flags)}")
        namespace.flags = host_flags
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        code = namespace.func(namespace)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # e.g. by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python flushes at the end
        return 141
    except KeyboardInterrupt:
        print("hbp: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split())
        if not flags_of_host:  # a plan's flags have shorter names here than in a run
            message = message.replace("--hbp-", "--")
        print(f"hbp: error: {message}", file=sys.stderr)
        return 2


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What comes before `--`, and after it: flags of the training that a command is about."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage, so that every error is one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _root_parser() -> argparse.ArgumentParser:
    return _Parser(prog="hbp", description="Hierarchical balance packing for Megatron-LM.")


if __name__ == "__main__":
    sys.exit(main())
