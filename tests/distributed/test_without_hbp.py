"""Without --hbp-* flags the host trains as if the plugin were not installed."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.distributed import flags

ROOT = Path(__file__).resolve().parents[2]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_without_flags_training_is_bit_identical(cluster):
    """MLA + MoE with aux loss, three steps: the same losses and weights, bit for bit, in a process
    that never imports megatron_hbp and in one that imports all of it, registers its flags and calls
    `setup`.
    """
    argv = [
        *flags.COMMON,
        *flags.SIZE,
        *flags.MLA,
        *flags.moe("aux_loss"),
        *["--seq-length", "32", "--global-batch-size", "2", "--train-iters", "3"],
        *["--eval-iters", "0"],
    ]
    argv = [flag for flag in argv if flag not in ("--hbp-device", "cpu")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.bare", *argv],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    bare = json.loads(lines[-1].removeprefix("RESULT "))
    with_plugin = cluster.run(
        1, "tests.distributed.jobs_stock:pretrain", argv=argv, with_plugin=True
    )[0]
    assert len(bare["losses"]) == 3
    assert bare["losses"][0] != bare["losses"][2]
    assert with_plugin["losses"] == bare["losses"]
    assert with_plugin["hash"] == bare["hash"]


def test_importing_the_plugin_reassigns_nothing_of_the_host(cluster):
    """After all of megatron_hbp is imported no attribute of a host module or class is ours."""
    found, modules = cluster.run(1, "tests.distributed.jobs_reassigned:ours_in_the_host")[0]
    assert modules > 200
    assert found == []


def test_off_without_a_plan_or_corpus(cluster):
    """The entry point says so instead of training something else."""
    argv = [*flags.COMMON, *flags.SIZE, "--seq-length", "32", "--global-batch-size", "1"]
    result = cluster.run(1, "tests.distributed.jobs:train", argv=[*argv, "--train-iters", "1"])[0]
    assert "no --hbp-plan and no --hbp-corpus" in result["error"]
