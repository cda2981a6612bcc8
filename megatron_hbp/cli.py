"""The command line: hbp prepare | plan | replan | audit | select | simulate | report | rehearse.

Guarantees (asserted by tests/unit/test_cli.py):
- results go to stdout, one error line to stderr (and progress, with --compare);
- exit code 0: done; 1: `audit` found a violation; 2: wrong use, with what is wrong, the rule and a
  way out on one line; 130: Ctrl-C; 141: whoever read stdout stopped reading, without a word;
- text that the terminal's encoding lacks is printed as escapes.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_hbp.commands import audit, plan, prepare, rehearse, replan, report, select, simulate


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        parser = _root_parser()
        subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
        for command in (prepare, plan, replan, audit, select, simulate, report, rehearse):
            command.add_command(subparsers)
        own, flags = _split(sys.argv[1:] if argv is None else argv)
        namespace = parser.parse_args(own)
        if flags and not getattr(namespace, "takes_flags", False):
            raise ValueError(f"this command takes no flags after --: {' '.join(flags)}")
        namespace.flags = flags
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
        message = " ".join(str(error).split()).replace("--hbp-", "--")
        print(f"hbp: error: {message}", file=sys.stderr)
        return 2


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What comes before `--`, and after it: flags of the training that a command is about."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first bare `--`: the command's words and the host's."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage, so that every error is one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _root_parser() -> argparse.ArgumentParser:
    return _Parser(prog="hbp", description="Hierarchical balance packing for Megatron-LM.")


if __name__ == "__main__":
    sys.exit(main())
