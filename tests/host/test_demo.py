"""The demo end to end on a few rows, and what it says of wrong files."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _demo(output: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "examples.demo", "--output", str(output), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_wrong_files_end_in_one_line(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('not json\n{"a": 1}\n')
    for data, error in (
        (tmp_path / "none.jsonl", "is not a file; name a .jsonl file of chat rows"),
        (bad, "all 2 rows were lost: no known text key 1, not JSON 1"),
    ):
        done = _demo(tmp_path / "out", "--data", str(data))
        assert done.returncode == 2
        assert done.stderr.startswith("demo: error: ")
        assert error in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_demo_trains_both_plans_on_the_same_tokens(tmp_path):
    pytest.importorskip("megatron.training", reason="needs the extra [train]")
    done = _demo(tmp_path, "--max-tokens", "60000")
    assert done.returncode == 0, done.stderr
    row = re.search(
        r"^trained tokens +(\d+) +(\d+) +(\d+) +(\d+)$", done.stdout, flags=re.MULTILINE
    )
    assert row, done.stdout
    assert len(set(row.groups())) == 1
    assert int(row[1]) > 10_000
    for name in ("imbalance between ranks", "slowest rank", "validation loss"):
        assert re.search(rf"^{name}.*\d", done.stdout, flags=re.MULTILINE)
