"""python -m megatron_hbp.host.rehearse: loads megatron once, forks it into the ranks of CPU runs.

Reads one JSON request a line from standard input and answers each with one line. Request:
{"argv", "world_size", "logs", "timeout", "kill"}; argv: flags of pretrain_gpt; logs: a folder that
gets rank-R.log, what each rank prints; timeout: seconds; kill: null, or {"step_log", "tracker",
"steps"}: as soon as every file of the step log tells `steps` steps and the tracker file of a
checkpoint is there, all ranks get SIGKILL. Answer: {"failed": ranks, "killed": bool, "timed_out":
bool}. Before the first request it prints {"temporary"}, its folder of temporary files.

Guarantees (asserted by tests/host/test_rehearse.py):
- when whoever started it ends, or it gets SIGTERM, it ends its ranks and what they started (the
  host's checkpoints have a helper process on each rank), and itself;
- nothing of one run is left for the next: each rank is a process of its own.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.005
_GRACE_SECONDS = 3.0  # for others to say why, once a rank has failed
_PR_SET_PDEATHSIG = 1
_LONGEST_FOLDER = 40  # characters

_children: dict[int, int] = {}  # pid and rank of those that run, for the handler of SIGTERM
_asked_and_answered: list[int] = []  # descriptors: closed in ranks, so that their end is seen


def _end_with_parent(parent: int, by: signal.Signals) -> None:
    """Has the kernel send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)


def _end(signal_number: int, frame: Any) -> None:
    """The handler of SIGTERM."""
    _end_all(_children)
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    os._exit(1)


def _use_own_temporary_folder() -> None:
    """What is imported makes folders for temporary files, and ranks are killed: one is removed."""
    usual = tempfile.gettempdir()
    # the host's processes make sockets there, whose names have 107 bytes at most
    short = usual if len(usual) <= _LONGEST_FOLDER else "/tmp"
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="hbp-rehearse-", dir=short)


def _load() -> None:
    """Everything that a rank would import, under the CPU runtime."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megatron_hbp.host import cpu

    cpu.install()
    import torch

    torch.set_num_threads(1)
    from megatron.core.tokenizers import text  # noqa: F401
    from megatron.training import arguments, training  # noqa: F401

    import megatron_hbp.host.training  # noqa: F401

    # the host reads its sources for help texts: parsed once here, every rank finds them
    arguments.add_megatron_arguments(argparse.ArgumentParser())
    gc.collect()
    gc.freeze()  # what is loaded stays out of the collections of ranks, which would copy its pages


def _free_port() -> int:
    """A port below the range that the kernel gives to connections: none can take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as some:
            try:
                some.bind(("0.0.0.0", port))  # where the store of the ranks listens
            except OSError:
                continue
            return port


def _rank(rank: int, request: dict[str, Any], port: int, parent: int) -> None:
    """A rank's whole life; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)  # so that processes which the host starts end with this rank
        for descriptor in _asked_and_answered:
            os.close(descriptor)
        _end_with_parent(parent, signal.SIGKILL)
        log = os.open(
            Path(request["logs"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        )
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdin = open(os.devnull)  # noqa: SIM115
        world = str(request["world_size"])
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        random.seed(rank)
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        from megatron_hbp.host import pretrain_gpt

        # the helper process of checkpoints: forked it has loaded what the host's own choice, a
        # spawned one, would load again for each rank
        filesystem_async.get_write_results_queue("fork")
        sys.argv = ["pretrain_gpt", *request["argv"]]
        pretrain_gpt.main()
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = 0 if stop.code in (None, 0) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    port, parent = _free_port(), os.getpid()
    children = _children
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            _rank(rank, request, port, parent)
        children[pid] = rank
    deadline = time.monotonic() + request["timeout"]
    failed: list[int] = []
    killed = timed_out = False
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            _end_group(pid)
            rank = children.pop(pid)
            if status and not killed and not timed_out:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            continue
        if not killed and not failed and _is_time(request["kill"]):
            killed = True
            _end_all(children)
        if time.monotonic() > deadline:
            timed_out = not failed
            _end_all(children)
            deadline = float("inf")
            failed = failed or sorted(children.values())
        time.sleep(_POLL_SECONDS)
    return {"failed": failed, "killed": killed, "timed_out": timed_out}


def _is_time(kill: dict[str, Any] | None) -> bool:
    if kill is None or not Path(kill["tracker"]).exists():
        return False
    files = list(Path(kill["step_log"]).glob("rank-*.jsonl"))
    counts = [file.read_text(errors="replace").count('"step"') for file in files]
    return bool(counts) and min(counts) >= kill["steps"]


def _end_all(children: dict[int, int]) -> None:
    for pid in children:
        _end_group(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # where it has no group of its own yet


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Answers requests until standard input ends."""
    _use_own_temporary_folder()
    signal.signal(signal.SIGTERM, _end)
    _end_with_parent(os.getppid(), signal.SIGTERM)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the host prints while it loads is no answer
    _asked_and_answered[:] = [answers.fileno(), sys.stdin.fileno()]
    _load()
    print(json.dumps({"temporary": tempfile.gettempdir()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=answers, flush=True)
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)


if __name__ == "__main__":
    main()
