"""Runs a function on several gloo processes and brings back what each returned."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


class JobError(AssertionError):
    """A rank failed; the message ends with its output."""


class Cluster:
    """A forked megatron per rank. Start once, run many jobs."""

    def __init__(self) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        assert self._answer() == {"ready": True}

    def run(self, world_size: int, target: str, timeout: float = 240, **kwargs: Any) -> list[Any]:
        """target: "module:function", called on every rank with kwargs (plain JSON values)."""
        with tempfile.TemporaryDirectory() as folder:
            request = {
                "world_size": world_size,
                "target": target,
                "kwargs": kwargs,
                "folder": folder,
                "timeout": timeout,
            }
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            failed = self._answer()["failed"]
            if failed:
                log = (Path(folder) / f"rank-{failed[0]}.log").read_text(errors="replace")
                raise JobError(
                    f"ranks {failed} of {world_size} failed; rank {failed[0]}:\n{log[-6000:]}"
                )
            return [
                torch.load(Path(folder) / f"rank-{rank}.pt", weights_only=False)
                for rank in range(world_size)
            ]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the zygote died; run `python -m tests.distributed.zygote` to see why"
        return json.loads(line)
