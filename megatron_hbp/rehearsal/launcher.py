"""Runs of a rehearsal: one process that has megatron loaded, and forks the ranks of each run.

Guarantee (asserted by tests/host/test_rehearse.py): when the block ends, in whatever way, no
process of it is left; when this process is killed, the kernel ends them.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
}


_PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class Ended:
    """How a run ended. failed: ranks that ended with an error, none of a run that was killed."""

    failed: list[int]
    killed: bool
    timed_out: bool


@dataclass(frozen=True)
class Kill:
    """When all ranks are killed: every file of step_log tells num_steps steps, and tracker is
    there, the file that names a checkpoint.
    """

    step_log: Path
    tracker: Path
    num_steps: int


class Launcher:
    """Make one with `launcher`."""

    def __init__(self, requests: IO[str], answers: IO[str], log: Path) -> None:
        self._requests = requests
        self._answers = answers
        self._log = log

    def wait_until_loaded(self) -> None:
        """Raises ValueError, with the end of its output, when megatron cannot be loaded."""
        self._answer()

    def run(
        self,
        argv: Sequence[str],
        world_size: int,
        logs: Path,
        *,
        timeout_seconds: float,
        kill: Kill | None = None,
    ) -> Ended:
        """Trains with flags `argv` on world_size ranks; rank R prints to logs/rank-R.log."""
        logs.mkdir(parents=True)
        request = {
            "argv": list(argv),
            "world_size": world_size,
            "logs": str(logs),
            "timeout": timeout_seconds,
            "kill": None
            if kill is None
            else {
                "step_log": str(kill.step_log),
                "tracker": str(kill.tracker),
                "steps": kill.num_steps,
            },
        }
        with contextlib.suppress(BrokenPipeError):  # told by the answer that is missing
            print(json.dumps(request), file=self._requests, flush=True)
        return Ended(**self._answer())

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if line:
            return json.loads(line)
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["without a word"]
        raise ValueError(
            f"the process that trains ended ({lines[-1].strip()}); see {self._log}, and install "
            "what is missing: pip install 'megatron_hbp[train]'"
        )


@contextlib.contextmanager
def launcher(log: Path) -> Iterator[Launcher]:
    """Starts the process that has megatron loaded. log: gets what it prints itself."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_hbp.host.rehearse"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Launcher(process.stdin, process.stdout, log)
    finally:
        process.terminate()  # ends its ranks, and what they started
        try:
            process.wait(timeout=_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
