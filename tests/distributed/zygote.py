"""A process that has megatron loaded and forks it: a whole gloo job starts in under a second.

Reads one JSON request a line from standard input, answers one JSON line to standard output.
Request: {"world_size", "target": "module:function", "kwargs", "folder", "timeout"}. Each rank runs
the target in its own forked process, so that nothing of one job is left for the next; its return
value goes to folder/rank-R.pt, its output to folder/rank-R.log.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

from megatron_hbp.host import cpu

cpu.install()

import torch

torch.set_num_threads(1)

import megatron.core.tokenizers.text  # brings transformers: loaded here, not in every rank
import megatron.training.arguments
import megatron.training.training

import megatron_hbp.host.training  # noqa: F401

# the host reads its sources for help texts: parsed once here, every rank finds them in linecache
megatron.training.arguments.add_megatron_arguments(argparse.ArgumentParser())


def _free_port() -> int:
    """A port below the range that the kernel gives to connections: none can take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port


def _child(rank: int, request: dict, port: int) -> None:
    os.setpgid(0, 0)  # so that workers which the host starts end with this rank
    folder = Path(request["folder"])
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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
    code = 1
    try:
        module, function = request["target"].split(":")
        result = getattr(importlib.import_module(module), function)(**request["kwargs"])
        torch.save(result, folder / f"rank-{rank}.pt.tmp")
        os.rename(folder / f"rank-{rank}.pt.tmp", folder / f"rank-{rank}.pt")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(request: dict) -> dict:
    port = _free_port()
    children = {}
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            _child(rank, request, port)
        children[pid] = rank
    deadline = time.monotonic() + request["timeout"]
    failed: list[int] = []
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > deadline:
                failed = failed or sorted(children.values())
                for other in children:
                    _end_group(other)
                deadline = float("inf")
            time.sleep(0.01)
            continue
        _end_group(pid)
        rank = children.pop(pid)
        if status != 0 and not failed:
            failed.append(rank)
            deadline = min(deadline, time.monotonic() + 2)  # the others would wait for it
    return {"failed": failed}


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
