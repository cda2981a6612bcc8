"""Runs the entry point on many command lines, each in its own forked process, up to training."""

import argparse
import contextlib
import json
import os
import sys
import traceback
from typing import Any

import megatron.training
from megatron.training.arguments import add_megatron_arguments, parse_and_validate_args

from megatron_hbp.host import pretrain_gpt


class _TrainingWouldStartError(Exception):
    pass


def outcomes(
    command_lines: list[list[str]], environments: list[dict[str, str]]
) -> list[dict[str, Any]]:
    """Per command line: {"error": text} for our clear error, {"starts": True} where training would
    start, {"exit": printed text} for argparse's, {"traceback": text} for anything else.
    """
    results = []
    for argv, environment in zip(command_lines, environments, strict=True):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with os.fdopen(writer, "w") as answer:
                json.dump(_outcome(argv, environment), answer)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            results.append(json.load(answer))
        os.waitpid(child, 0)
    return results


def _outcome(argv: list[str], environment: dict[str, str]) -> dict[str, Any]:
    os.environ |= environment
    sys.argv = ["pretrain_gpt", *argv]
    megatron.training.pretrain = _stop
    printed = os.memfd_create("printed")
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    try:
        with contextlib.redirect_stdout(os.fdopen(1, "w", closefd=False)):
            pretrain_gpt.main()
    except _TrainingWouldStartError:
        return {"starts": True}
    except SystemExit as stop:
        if isinstance(stop.code, str):
            return {"error": stop.code}
        sys.stdout.flush()
        sys.stderr.flush()
        return {"exit": os.pread(printed, 1 << 20, 0).decode(errors="replace")}
    except BaseException:
        return {"traceback": traceback.format_exc()}
    raise AssertionError("the entry point returned")


def _stop(**kwargs: Any) -> None:
    raise _TrainingWouldStartError


def argument_names(argv: list[str]) -> list[str]:
    """Names of the host's arguments: those it parses and those it adds when it validates."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parsed = {action.dest for action in add_megatron_arguments(parser)._actions}
    sys.argv = ["pretrain_gpt", *argv]
    validated = parse_and_validate_args(extra_args_provider=pretrain_gpt.with_arguments(None))
    return sorted(parsed | set(vars(validated)))
