"""How far `hbp prepare` is: a bar on a terminal, a line every ten seconds elsewhere."""

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

if TYPE_CHECKING:
    from megatron_hbp.corpus.preparation import Progress as Done

_SECONDS = 10.0


class RowProgress:
    """Shows rows, bytes, rates and the time left on stderr. A context manager."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar = (
            Progress(
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TextColumn("{task.fields[rows]}"),
                TimeRemainingColumn(),
                console=console,
            )
            if console.is_terminal
            else None
        )
        self._task = None
        self._start: tuple[float, tuple[int, int]] | None = None
        self._last = 0.0

    def __enter__(self) -> "RowProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: "Done") -> None:
        """Shows that so much is done."""
        now = time.monotonic()
        if self._start is None:  # rates are of this run, not of one that it goes on with
            self._start = (now, (done.bytes_read, done.counts.rows_in))
            self._last = now
        started, (bytes_then, rows_then) = self._start
        seconds = max(now - started, 1e-9)
        rows = done.counts.rows_in
        lost = done.counts.rows_rejected + done.counts.rows_dropped
        text = f"{rows} rows, {(rows - rows_then) / seconds:.0f}/s, {lost} lost"
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(
                    "", total=done.bytes_total, completed=done.bytes_read, rows=text
                )
            self._bar.update(self._task, completed=done.bytes_read, rows=text)
            return
        if now - self._last < _SECONDS:
            return
        self._last = now
        rate = (done.bytes_read - bytes_then) / seconds
        left = (done.bytes_total - done.bytes_read) / rate if rate else float("inf")
        print_line(
            f"{text}, {done.bytes_read / max(1, done.bytes_total):.1%} of the input, "
            f"{rate / 1e6:.1f} MB/s, {left:.0f} s left"
        )


def print_line(text: str) -> None:
    """A line for the user on stderr."""
    print(f"hbp: {text}", file=sys.stderr, flush=True)
