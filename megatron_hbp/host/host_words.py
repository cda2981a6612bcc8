"""Errors of the host in one line: what it refuses, where, and what to do about it.

Guarantees (asserted by tests/host/test_host_words.py): a bare assertion comes with the line that it
is on; what a machine or the assumed Transformer Engine lacks is told apart from wrong flags.
"""

import re
import sys
import traceback
import warnings
from pathlib import Path

_OLDER = re.compile(r"\b(TE|transformer.?engine) ?>=", re.IGNORECASE)
_LACKING = re.compile(r"not installed|is required|please install|should be i\w+ed", re.IGNORECASE)


def last_words(stop: SystemExit) -> str:
    """Why a parser or one of our checks ended the process; stderr is a file."""
    if isinstance(stop.code, str):
        return stop.code.removeprefix("megatron_hbp: error: ")
    sys.stdout.flush()
    sys.stderr.flush()
    lines = Path("/proc/self/fd/2").read_text(errors="replace").splitlines()
    if not lines:
        return f"the host ended with code {stop.code}"
    return (
        f"{lines[-1].partition('error: ')[2] or lines[-1]}; `python -m "
        "megatron_hbp.host.pretrain_gpt --help` lists all flags"
    )


def host_words(error: Exception) -> str:
    """An error that is_host(). A bare assertion: the line that it is on."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_hosts(frame)]
    where = f"({Path(frames[-1].filename).name}, {frames[-1].name})"
    text = " ".join(str(error).split()) or f"not ({frames[-1].line})"
    if any("tokenizers" in Path(frame.filename).parts for frame in frames):
        return (
            f"the tokenizer cannot be made here: {text} {where}; only its size counts: check with "
            "--tokenizer-type NullTokenizer --vocab-size N, or where its files are"
        )
    if _OLDER.search(text):
        return (
            f"Megatron refuses these flags with the Transformer Engine that is assumed: {text} "
            f"{where}; name the cluster's release with --transformer-engine, or leave the flag out "
            "that this is about"
        )
    if isinstance(error, ImportError) or _LACKING.search(text):
        return (
            f"Megatron does not find what these flags need: {text} {where}; install it here to "
            "check them, or leave the flag out that this is about"
        )
    return f"Megatron refuses these flags: {text} {where}; change the flag that this is about"


def own_words(error: Exception) -> str:
    """An error of the check's own, which is no verdict on the run."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return (
        f"the check cannot go on: {type(error).__name__}: {text} ({Path(frame.filename).name}, "
        f"{frame.name}); this says nothing about the flags"
    )


def is_host(error: Exception) -> bool:
    """Whether the host raised it, or a library that it called, not a check of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [place for place, frame in enumerate(frames) if "megatron_hbp" in _parts(frame)]
    hosts = [place for place, frame in enumerate(frames) if _is_hosts(frame)]
    return bool(hosts) and hosts[-1] > max(ours, default=-1)


def is_about_flags(warned: warnings.WarningMessage) -> bool:
    """Whether the host's validation said it: it changes flags without an error."""
    return "megatron" in Path(warned.filename).parts and "Transformer Engine" not in str(
        warned.message
    )


def _is_hosts(frame: traceback.FrameSummary) -> bool:
    return "megatron" in _parts(frame)


def _parts(frame: traceback.FrameSummary) -> tuple[str, ...]:
    return Path(frame.filename).parts
