"""Recipes rehearsed: trained on CPU processes, killed with SIGKILL and resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from megatron_hbp import cli
from megatron_hbp.plan import Plan
from megatron_hbp.rehearsal.launcher import RehearsalError, launcher
from megatron_hbp.trained import trained_steps

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))
RECIPES = [path.stem for path in RECIPES if path.name != "sft.toml"]
IN_EVERY_TEST_RUN = ("llama-3.1-8b", "deepseek-v2-128k")

SMALL = """
[cluster]
gpus = 8
device = "h100-80gb"
[flags]
num-layers = 8
hidden-size = 1024
num-attention-heads = 8
ffn-hidden-size = 2048
vocab-size = 1000
seq-length = 1024
global-batch-size = 16
micro-batch-size = 1
dataloader-type = "external"
calculate-per-token-loss = true
position-embedding-type = "rope"
normalization = "RMSNorm"
swiglu = true
disable-bias-linear = true
attention-dropout = 0.0
hidden-dropout = 0.0
max-position-embeddings = 2048
lr = 1e-3
hbp-corpus = "corpus"
hbp-level = ["1024:1", "2048:2:full"]
"""


@pytest.fixture
def small(tmp_path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_TEST_RUN else pytest.mark.slow)
        for name in RECIPES
    ],
)
def test_bundled_recipe(name, tmp_path, capsys):
    """The log that is kept proves the verdict: it is read again, from the files."""
    recipe = ROOT / "examples" / "recipes" / f"{name}.toml"
    output = tmp_path / "output"
    code = cli.main(["rehearse", str(recipe), "--json", "--output", str(output)])
    result = json.loads(capsys.readouterr().out)
    assert result["problems"] == []
    assert code == 0
    assert result["passed"] is True
    assert result["processes"] <= 8
    (document,) = (output / "plans").glob("*/plan.json")
    plan = Plan.load(document.parent)
    trained = trained_steps(output / "steps", plan)
    assert trained.problems == []
    assert (trained.steps, trained.restarts) == (plan.num_steps, 1)
    assert result["starts_from_weights"] is True
    assert result["resumed_at"] == 4
    assert result["repeated_steps"] == [4, 5]
    cp_sizes = {int(text.split(":")[1]) for text in result["levels"]}
    assert {int(cp) for cp in result["microbatches_by_cp_size"]} == cp_sizes
    assert all(result["microbatches_by_cp_size"].values())
    assert len(result["losses"]) == plan.num_steps
    assert sorted(path.name for path in (output / "run-1").glob("rank-*.log")) == sorted(
        path.name for path in (output / "run-2").glob("rank-*.log")
    )


EVERYTHING = """
include = ["{models}/deepseek-v2-32k.toml"]
[flags]
tensor-model-parallel-size = 4
sequence-parallel = true
expert-tensor-parallel-size = 1
pipeline-model-parallel-size = 4
num-virtual-stages-per-pipeline-rank = false
decoder-first-pipeline-num-layers = false
decoder-last-pipeline-num-layers = false
num-layers-per-virtual-pipeline-stage = 5
global-batch-size = 128
hbp-level = ["4096:1", "32768:8:full"]
hbp-valid-corpus = "valid"
hbp-loss-normalizer = "sample-mean"
tensorboard-dir = "tensorboard"
fp8-format = "hybrid"
fp8-recipe = "blockwise"
moe-router-enable-expert-bias = true
moe-router-score-function = "sigmoid"
moe-router-pre-softmax = false
moe-shared-expert-overlap = true
async-save = true
"""


@pytest.mark.slow
def test_all_kinds_of_parallelism_with_validation(tmp_path, capsys):
    """TP with sequence parallelism, PP, virtual stages, EP, MLA, grouped routing, expert bias."""
    recipe, output = tmp_path / "everything.toml", tmp_path / "output"
    recipe.write_text(
        EVERYTHING.format(models=os.path.relpath(ROOT / "examples/recipes", tmp_path))
    )
    assert cli.main(["rehearse", str(recipe), "--json", "--output", str(output)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["problems"] == []
    layout = {"tp": 2, "stages": 2, "virtual_stages": 2, "ranks": 2, "ep": 2, "microbatches": 4}
    assert result["layout"] == layout
    last = (output / "run-2" / "rank-7.log").read_text(errors="replace")
    assert "validation loss at iteration 8" in last
    assert list((output / "tensorboard").iterdir())


def test_a_run_that_fails_says_why(small, tmp_path, capsys):
    output = tmp_path / "output"
    argv = ["rehearse", str(small), "--output", str(output), "--processes", "2"]
    assert cli.main([*argv, "--", "--sft"]) == 1
    out = capsys.readouterr().out
    assert "megatron_hbp: error: --sft is not supported with HBP" in out
    assert f"the end of {output / 'run-1' / 'rank-'}" in out
    assert out.strip().endswith("failed")
    assert f"files: {output}" in out


def test_a_run_that_would_start_over_after_a_failure_does_not_pass(small, tmp_path, capsys):
    argv = ["rehearse", str(small), "--json", "--processes", "2", "--output", str(tmp_path / "o")]
    assert cli.main([*argv, "--", "--finetune", "--pretrained-checkpoint", "weights"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert any("started at step 0" in problem for problem in result["problems"])
    assert result["passed"] is False


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--processes", "9"], "--processes is 9; give 1 to 8"),
        (["--steps", "2"], "--steps is 2; give at least 6"),
        (["--output", "{here}"], "is there already; name a new or an empty folder"),
        (["--", "--num-layers", "x"], "--num-layers is 'x'; give a whole number"),
        (["--", "--seq-length", "64"], "use 64:1"),
    ],
)
def test_wrong_use_starts_nothing(small, tmp_path, capsys, more, message):
    here = str(tmp_path)
    assert cli.main(["rehearse", str(small), *(word.format(here=here) for word in more)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_recipe_whose_lengths_are_beyond_its_levels(small, tmp_path, capsys):
    (tmp_path / "lengths.csv").write_text("length,count\n100,50\n3000,2\n")
    small.write_text(SMALL + '[data]\nlengths = "lengths.csv"\n')
    assert cli.main(["rehearse", str(small)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 sequences of" in (error := captured.err)
    assert "longer than the longest level 2048:2:full; add a longer --hbp-level" in error


@pytest.mark.parametrize(
    ("who", "sent", "code"),
    [
        ("command", signal.SIGKILL, -signal.SIGKILL),
        ("command", signal.SIGINT, 130),
        ("launcher", signal.SIGKILL, 1),
    ],
)
def test_nothing_is_left_running(small, who, sent, code):
    """One is stopped after a checkpoint, for which each rank has started a process."""
    temporary = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short: see rehearse.py
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_hbp.cli", "rehearse", str(small), "--processes", "2"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    started: dict[int, psutil.Process] = {}
    try:
        deadline = time.monotonic() + 100
        while not list(temporary.glob("*/checkpoints/latest_*")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        for child in psutil.Process(process.pid).children(recursive=True):
            started[child.pid] = child
        assert len(started) >= 5  # the process that loads megatron, ranks, what these started
        (launcher_process,) = psutil.Process(process.pid).children()
        (process if who == "command" else launcher_process).send_signal(sent)
        out, _ = process.communicate(timeout=20)
        assert process.returncode == code
        assert (b"was it killed, for memory perhaps?" in out) == (who == "launcher")
        _, alive = psutil.wait_procs(list(started.values()), timeout=10)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
        time.sleep(1)  # the last process tidies up after its ranks have ended
        left = [
            folder.name for folder in temporary.iterdir() if not (folder / "flags.txt").exists()
        ]
        assert left == []
        # without --output a folder stays where nobody could remove it, or for its logs
        assert (list(temporary.iterdir()) == []) == (sent == signal.SIGINT)
    finally:
        for child in [*started.values()]:
            if child.is_running():
                child.kill()
        process.kill()
        process.wait()
        shutil.rmtree(temporary)


def test_a_process_that_ends_while_it_loads_says_so(tmp_path, small, capsys, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('megatron cannot be found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        launcher(tmp_path / "log") as host,
        pytest.raises(RehearsalError, match=r"the process that trains ended \(.*cannot be found\)"),
    ):
        host.wait_until_loaded()
    output = tmp_path / "output"
    assert cli.main(["rehearse", str(small), "--output", str(output)]) == 1
    assert str(output / "launcher.log") in capsys.readouterr().out
    assert "cannot be found" in (output / "launcher.log").read_text()
