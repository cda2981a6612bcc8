"""Runs of a rehearsal: one process that has megatron loaded, and forks the ranks of each run.

Guarantee (asserted by tests/host/test_rehearse.py): when the block ends, in whatever way, no
process of it is left, also where the process that forks was killed; when this process is killed,
the kernel ends them.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
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


class RehearsalError(Exception):
    """A run did not end as it should; the text has the end of a log and its file."""


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
        self.temporary: str | None = None  # what the process makes for itself, once it has loaded

    def wait_until_loaded(self) -> None:
        """Raises RehearsalError, with the end of its output, when megatron cannot be loaded."""
        self.temporary = self._answer()["temporary"]

    def run(
        self,
        argv: Sequence[str],
        world_size: int,
        logs: Path,
        *,
        timeout_seconds: float,
        kill: Kill | None = None,
    ) -> Ended:
        """Trains with flags `argv` on world_size ranks; rank R prints to logs/rank-R.log.

        Raises RehearsalError when the process that forks the ranks has ended.
        """
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
        lines = self._log.read_text(errors="replace").strip().splitlines()
        last = lines[-1].strip() if lines else "without a word"
        way_out = (
            "install what is missing: pip install 'megatron_hbp[train]'"
            if self.temporary is None
            else "was it killed, for memory perhaps?"
        )
        raise RehearsalError(
            f"the process that trains ended ({last}); {way_out} Its output: {self._log}"
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
    host = Launcher(process.stdin, process.stdout, log)
    try:
        yield host
    finally:
        process.terminate()  # ends its ranks, and what they started
        _wait_unreaped(process)
        _end_session(process.pid)  # where it could not do so itself: it was killed
        process.wait()
        if host.temporary is not None:
            shutil.rmtree(host.temporary, ignore_errors=True)
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _wait_unreaped(process: "subprocess.Popen[str]") -> None:
    """Waits until it has ended, for a while, then ends it. Its id stays taken."""
    how = os.WEXITED | os.WNOWAIT
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while process.returncode is None and not os.waitid(os.P_PID, process.pid, how | os.WNOHANG):
        if time.monotonic() > deadline:
            process.kill()
            os.waitid(os.P_PID, process.pid, how)
        time.sleep(0.01)


def _end_session(leader: int) -> None:
    """Kills what is left of the session that a process of ours has made."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            session = int(stat.read_text(errors="replace").rpartition(")")[2].split()[3])
            pid = int(stat.parent.name)
            if session == leader != pid:
                os.kill(pid, signal.SIGKILL)
