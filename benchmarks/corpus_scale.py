"""Millions of rows prepared, planned and audited by the command line: make bench-corpus.

Prints wall time and the peak resident memory of the largest process of each command. With --rows
given twice, the memory of both shows whether it grows with the number of rows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

_TOKENIZER = Path(__file__).resolve().parents[2] / "shared" / "data" / "tokenizer" / "tt2k"
_WORDS = "the of and to in is that it was for on are with as his they at be this have".split()
_ROWS_AT_ONCE = 20_000
MEMORY_BAR = 1.5 * 2**30  # bytes a process


def write_rows(path: Path, count: int, seed: int = 0) -> None:
    """Chats of log-normal length, about 300 characters on average, the longest about 40,000."""
    random = np.random.default_rng(seed)
    words = np.array(_WORDS)
    with path.open("w") as file:
        for first in range(0, count, _ROWS_AT_ONCE):
            number = min(_ROWS_AT_ONCE, count - first)
            lengths = np.clip(random.lognormal(3.4, 1.1, number), 4, 10_000).astype(int)
            for row, length in enumerate(lengths, start=first):
                text = " ".join(words[random.integers(0, len(words), length)])
                cut = len(text) * 2 // 3
                messages = [
                    {"role": "user", "content": f"{row}: {text[:cut]}"},
                    {"role": "assistant", "content": text[cut:] or "yes"},
                ]
                file.write(json.dumps({"messages": messages}) + "\n")


def run(command: list[str]) -> dict[str, float]:
    """Runs `hbp ...`; seconds, and the peak memory in bytes of its largest process."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_hbp.cli", *command], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"hbp {command[0]} ended with exit code {process.returncode}")
    return {"seconds": time.perf_counter() - start, "bytes": usage.ru_maxrss * 1024}


def measure(rows: int, folder: Path) -> list[dict]:
    """Each command on `rows` rows."""
    source, corpus, plan = folder / "rows.jsonl", folder / "corpus", folder / "plan"
    write_rows(source, rows)
    commands = {
        "prepare": ["prepare", "--input", source, "--tokenizer", _TOKENIZER, "--output", corpus],
        "plan": [
            *("plan", "--corpus", corpus, "--output", plan),
            *("--level", "4096:1", "--level", "32768:8", "--ranks", "32", "--microbatches", "8"),
        ],
        "audit": ["audit", plan, "--corpus", corpus],
    }
    results = []
    for name, command in commands.items():
        results.append({"rows": rows, "command": name, **run([str(part) for part in command])})
        print(
            f"{rows:>10} rows  hbp {name:<8} {results[-1]['seconds']:>8.1f} s  "
            f"{results[-1]['bytes'] / 2**20:>8.0f} MiB",
            flush=True,
        )
    info = json.loads((corpus / "corpus.json").read_text())
    print(f"{'':>10}       {source.stat().st_size / 1e6:.0f} MB of text, {info['tokens']} tokens")
    return results


def main() -> None:
    """Prints the figures; exit code 1 when a process needs more memory than the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    results = []
    for rows in given.rows or [500_000, 2_000_000]:
        with tempfile.TemporaryDirectory() as folder:
            results += measure(rows, Path(folder))
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=2) + "\n")
    most = max(result["bytes"] for result in results)
    print(f"largest process {most / 2**20:.0f} MiB, bar {MEMORY_BAR / 2**20:.0f} MiB")
    sys.exit(most > MEMORY_BAR)


if __name__ == "__main__":
    main()
