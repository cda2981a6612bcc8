"""Trains as on several nodes: some flags are each rank's own."""

import contextlib
import io
import os
from typing import Any

from tests.distributed.jobs import train as plain_train


def train(argv: list[str], own: list[list[str]]) -> dict[str, Any]:
    """`jobs.train` with the flags of this rank, own[rank], after those of all; and "printed"."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        result = plain_train([*argv, *own[int(os.environ["RANK"])]])
    return result | {"printed": printed.getvalue()}
