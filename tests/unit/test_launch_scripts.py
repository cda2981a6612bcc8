"""The scripts that launch a recipe, with stand-ins for what a cluster has."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hbp.recipe import read_recipe

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples" / "launch").glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_scripts_are_bash(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


@pytest.fixture
def launch(tmp_path):
    """Runs a script with stand-ins for what a cluster has; returns it done, and their calls."""
    calls = tmp_path / "calls"

    def stand_in(name, body):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

    record = f'printf "%s\\n" {{}} "$@" "" >> {calls}'
    ended = '\nexit "${TORCHRUN_STATUS:-0}"'
    stand_in("torchrun", f"env > {tmp_path}/environment\n" + record.format("torchrun") + ended)
    stand_in("scontrol", record.format("scontrol") + '\nprintf "node%d\\n" 7 8')
    stand_in("srun", 'while [[ $1 == -* ]]; do shift; done\nSLURM_NODEID=1 exec "$@"')
    stand_in(
        "hbp",
        f'[[ $1 == check ]] && {{ {record.format("hbp")}; exit "${{CHECK_STATUS:-0}}"; }}\n'
        f'exec {shlex.quote(sys.executable)} -m megatron_hbp.cli "$@"',
    )

    def run(script, *argv, **environment):
        calls.write_text("")
        done = subprocess.run(
            ["bash", str(ROOT / "examples" / "launch" / script), *argv],
            env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"} | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        return done, [call.split("\n") for call in calls.read_text().split("\n\n") if call]

    return run


LLAMA = "examples/recipes/llama-3.1-8b.toml"


def test_torchrun_gets_the_recipes_flags_and_those_given(launch):
    several = {"NODES": "4", "NODE_RANK": "0", "HEAD": "n0"}
    done, calls = launch("torchrun.sh", LLAMA, "--hbp-corpus", "/data/a b", **several)
    assert done.returncode == 0, done.stderr
    check, torchrun = calls
    assert check[:6] == ["hbp", "check", LLAMA, "--gpus", "32", "--gpus-per-node"]
    assert check[-3:] == ["--", "--hbp-corpus", "/data/a b"]
    start = torchrun.index("megatron_hbp.host.pretrain_gpt")
    own = torchrun[: start + 1]
    for words in (["--nnodes", "4"], ["--nproc-per-node", "8"], ["--rdzv-endpoint", "n0:29500"]):
        assert own[own.index(words[0]) + 1] == words[1]
    assert own[own.index("--max-restarts") + 1] == "3"
    conf = own[own.index("--rdzv-conf") + 1]  # the check of the first node is longer than a minute
    assert {"read_timeout=1800", "join_timeout=1800"} == set(conf.split(","))
    wanted = read_recipe(ROOT / LLAMA).command_line(["--hbp-corpus", "/data/a b"])
    assert torchrun[start + 1 :] == wanted


@pytest.mark.parametrize("value", [None, "0"])
def test_the_environment_is_set_unless_the_user_did(launch, tmp_path, value):
    names = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "CUDA_DEVICE_MAX_CONNECTIONS")
    done, _ = launch("torchrun.sh", LLAMA, **({} if value is None else dict.fromkeys(names, value)))
    assert done.returncode == 0, done.stderr
    found = (tmp_path / "environment").read_text().splitlines()
    for name in names:
        assert f"{name}={value or 1}" in found


def test_only_the_first_node_checks(launch):
    done, calls = launch("torchrun.sh", LLAMA, NODES="4", NODE_RANK="2", HEAD="n0")
    assert done.returncode == 0, done.stderr
    assert [call[0] for call in calls] == ["torchrun"]


def test_nothing_starts_when_the_check_fails(launch):
    several = {"NODES": "4", "NODE_RANK": "0", "HEAD": "n0"}
    done, calls = launch("torchrun.sh", LLAMA, CHECK_STATUS="1", **several)
    assert done.returncode == 1
    assert [call[0] for call in calls] == ["hbp"]


def test_nothing_starts_when_the_flags_cannot_be(launch):
    done, calls = launch("torchrun.sh", LLAMA, NODES="5", NODE_RANK="0", HEAD="n0")
    assert done.returncode == 2
    assert "--global-batch-size 32 is no multiple of the 40 ranks" in done.stderr
    assert calls == []


@pytest.mark.parametrize("given", [{}, {"HEAD": "n0"}, {"NODE_RANK": "1"}])
def test_several_nodes_know_the_first_one_and_themselves(launch, given):
    done, calls = launch("torchrun.sh", LLAMA, NODES="2", **given)
    assert done.returncode == 2
    assert "2 nodes need HEAD" in done.stderr
    assert calls == []


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sh"])
@pytest.mark.parametrize("argv", [[], ["--hbp-corpus", "x"]])
def test_a_launch_without_a_recipe(launch, script, argv):
    done, calls = launch(script, *argv)
    assert done.returncode == 2
    assert "usage: " in done.stderr
    assert calls == []


SLURM = {
    "SLURM_NNODES": "4",
    "SLURM_JOB_ID": "123",
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_SUBMIT_DIR": str(ROOT),
}


def test_slurm_starts_the_launcher_on_every_node(launch):
    done, calls = launch("slurm.sh", LLAMA, "--lr", "2e-5", **SLURM)
    assert done.returncode == 0, done.stderr
    hostnames, torchrun = calls  # node 1 of the stand-in: no check
    assert hostnames == ["scontrol", "show", "hostnames", "node[7-8]"]
    assert torchrun[torchrun.index("--rdzv-endpoint") + 1] == "node7:20123"
    assert torchrun[torchrun.index("--rdzv-id") + 1] == "123-0"
    assert torchrun[-2:] == ["--lr", "2e-5"]


@pytest.mark.parametrize(
    ("after", "restarts", "requeued"), [("-1", "4", True), ("-1", "5", False), ("99", "0", False)]
)
def test_slurm_puts_a_failed_job_back_unless_it_failed_at_once(launch, after, restarts, requeued):
    done, calls = launch(
        "slurm.sh",
        LLAMA,
        **SLURM,
        TORCHRUN_STATUS="3",
        REQUEUE_AFTER_SECONDS=after,
        SLURM_RESTART_COUNT=restarts,
    )
    assert done.returncode == 3
    assert (["scontrol", "requeue", "123"] in calls) is requeued
