"""Real processes of `hbp prepare`, their inputs, and what they leave."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from tests.unit.corpus_samples import chat, write_rows

ROOT = Path(__file__).resolve().parents[2]
CAP = 150  # tokens, that some of the rows are longer than
OPTIONS = ("--max-length", str(CAP), "--overlong", "truncate", "--valid-share", "0.1")


def mixed_inputs(folder: Path, rows_each: int) -> list[Path]:
    """Four kinds of files and two without rows; good, bad, long and equal rows, blank lines."""
    folder.mkdir()
    rng = random.Random(5)

    def rows(name: str) -> list[dict]:
        made = []
        for i in range(rows_each):
            kind = rng.random()
            if kind < 0.06:
                made.append(chat("u", [f"{name} {i}"]))
            elif kind < 0.2:
                made.append(chat("ua", ["q" * rng.randrange(60, 180), f"answer {i}"]))
            else:
                answer = "".join(rng.choices("abc \u4e2d\n", k=rng.randrange(1, 60)))
                made.append(chat("ua", [f"{name} {i}", f"{answer} {rng.randrange(9)}"]))
        return made

    lines = write_rows(folder / "1.jsonl", rows("lines"))
    lines.write_text(lines.read_text().replace("\n", "\n\n", 5) + "{broken\n")
    empty = folder / "2.json"
    empty.write_text("[]")
    packed = folder / "3.jsonl.gz"
    text = "".join(json.dumps(row) + "\n" for row in rows("gz"))
    packed.write_bytes(gzip.compress(text.encode(), mtime=0))
    array = folder / "4.json"
    array.write_text(json.dumps(rows("array"), indent=1))
    table = folder / "5.parquet"
    pq.write_table(pa.Table.from_pylist(rows("table")), table, row_group_size=rows_each // 7 + 1)
    last = folder / "6.json"
    last.write_text("[ ]")
    return [lines, empty, packed, array, table, last]


def start(
    inputs: list[Path],
    tokenizer: Path,
    output: Path,
    *options: str,
    workers: int = 2,
    seconds: float = 0.02,
    block_bytes: int = 1 << 14,
    **popen,
) -> subprocess.Popen:
    """`hbp prepare` that saves a checkpoint every `seconds`, with blocks of block_bytes."""
    arguments = [sys.executable, "-m", "tests.kills.hbp", str(seconds), str(block_bytes)]
    arguments += ["prepare", "--input", *map(str, inputs), "--tokenizer", str(tokenizer)]
    arguments += ["--output", str(output), "--workers", str(workers), *options]
    popen = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | popen
    return subprocess.Popen(arguments, cwd=ROOT, **popen)


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a corpus by its path in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def work_of(output: Path) -> Path:
    """Where the work on a corpus lies that is not finished."""
    return output.with_name(f".{output.name}.preparing")


def saved_rows(output: Path) -> int | None:
    """Rows at the last checkpoint; None when there is none."""
    try:
        return json.loads((work_of(output) / "progress.json").read_text())["state"]["counts"][
            "rows_in"
        ]
    except FileNotFoundError:
        return None


def until(condition: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
    """Waits for a condition; fails when it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.01)


def kill(run: subprocess.Popen) -> None:
    """kill -9 of the one process; its workers must end by themselves, and quietly."""
    workers = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == [], f"{len(alive)} workers outlive the process that started them"
