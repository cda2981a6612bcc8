"""examples/launch/torchrun.sh with the real torchrun: a killed process is started again with the
others, in the same job, and every row is trained once.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_hbp import cli
from tests.distributed import flags, handmade

ROOT = Path(__file__).parents[2]
FIRST_STEPS = 8  # of the first start; a checkpoint is there from step 3 on


def _value(word: str) -> str:
    return word if word.isdecimal() else f'"{word}"'


def _recipe(folder: Path) -> Path:
    """A recipe of the flags, which all have one value or none."""
    words = [*flags.COMMON, *flags.SIZE, *flags.GQA, "--num-layers", "2", "--seq-length", "32"]
    words += ["--global-batch-size", "4", "--use-distributed-optimizer", "--save-interval", "3"]
    words += ["--dist-ckpt-optim-fully-reshardable", "--hbp-corpus", str(folder / "corpus")]
    words += ["--hbp-step-log", str(folder / "steps"), "--hbp-plan-cache", str(folder / "plans")]
    words += ["--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")]
    given: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            given[word[2:]] = "true" if following.startswith("--") else _value(following)
    lines = [f"{name} = {value}" for name, value in given.items()]
    recipe = folder / "small.toml"
    recipe.write_text(
        '[cluster]\ngpus = 2\ndevice = "h100-80gb"\n[flags]\nhbp-level = ["32:1", "64:2"]\n'
        + "\n".join(lines)
    )
    return recipe


def _pid_of_rank(rank: int, run_id: str) -> int:
    """The process of the run that this test started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if {f"RANK={rank}".encode(), f"TORCHELASTIC_RUN_ID={run_id}".encode()} <= set(found):
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
def test_a_killed_process_is_started_again_and_the_run_goes_on(tmp_path, capsys):
    handmade.random_corpus(tmp_path / "corpus", [20 + (7 * i) % 40 for i in range(120)])
    run_id = f"test-{os.getpid()}"
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GPUS_PER_NODE": "2",
        "CHECK": "0",
        "RUN_ID": run_id,
        "PORT": str(20000 + os.getpid() % 20000),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    log = tmp_path / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            ["bash", ROOT / "examples" / "launch" / "torchrun.sh", _recipe(tmp_path)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as run,
    ):
        try:
            steps = tmp_path / "steps" / "rank-00001.jsonl"
            until = time.monotonic() + 120
            while not steps.exists() or steps.read_text().count('"step"') < FIRST_STEPS:
                assert run.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(0.02)
            os.kill(_pid_of_rank(1, run_id), signal.SIGKILL)
            assert run.wait(timeout=180) == 0, log.read_text()[-3000:]
        finally:
            if run.poll() is None:
                run.terminate()  # torchrun ends its processes
                run.wait(timeout=60)
    (plan,) = (file.parent for file in (tmp_path / "plans").glob("*/plan.json"))
    assert cli.main(["audit", str(plan), "--step-log", str(tmp_path / "steps")]) == 0
    found = capsys.readouterr().out
    assert "1 restarts; epoch 0: 120 of 120 sequences" in found
