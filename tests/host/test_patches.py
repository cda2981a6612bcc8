"""The patches of patches/: small, strict, still needed, and really trained through.

With MEGATRON_LM_PATH (a clone of Megatron-LM that has the tag) they are applied to a copy of the
tag, and the patched script trains on CPU; without it those tests are skipped.
"""

import importlib.util
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from tests.distributed import flags, handmade

ROOT = Path(__file__).resolve().parents[2]
TAG = "core_v0.19.0"
(PATCH,) = (ROOT / "patches" / "core_v0.19").glob("*.patch")
SCRIPT = "pretrain_gpt.py"
MODEL = [*flags.COMMON, *flags.SIZE, *flags.GQA, "--seq-length", "64"]


def _git(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """git outside of any repository, so that `git apply` sees the folder and nothing else."""
    return subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments],
        cwd=cwd,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(cwd.parent)},
        capture_output=True,
        check=False,
    )


def _apply(tree: Path, *options: str) -> subprocess.CompletedProcess:
    return _git("apply", *options, str(PATCH), cwd=tree)


def test_patch_is_small_and_touches_one_file(tmp_path):
    counted = _apply(tmp_path, "--numstat")
    assert counted.returncode == 0, counted.stderr
    added, removed, name = counted.stdout.decode().split()
    assert name == SCRIPT
    assert int(added) <= 10
    assert int(removed) <= 2


def test_patch_calls_what_the_plugin_has():
    from megatron_hbp.host import pretrain_gpt

    added = [line[1:] for line in PATCH.read_text().splitlines() if line.startswith("+")]
    called = set(re.findall(r"\bhbp\.(\w+)\(", "\n".join(added)))
    assert called == {"prepare_device", "with_arguments", "setup_or_exit"}
    for name in called:
        assert callable(getattr(pretrain_gpt, name))


def test_readme_lists_every_patch():
    text = (ROOT / "patches" / "README.md").read_text()
    listed = set(re.findall(r"`(\S+\.patch)`", text))
    assert listed == {
        str(path.relative_to(ROOT / "patches")) for path in (ROOT / "patches").rglob("*.patch")
    }


@pytest.fixture(scope="module")
def checkout() -> Path:
    path = os.environ.get("MEGATRON_LM_PATH")
    if not path:
        pytest.skip("needs MEGATRON_LM_PATH, a clone of Megatron-LM")
    return Path(path).resolve()


@pytest.fixture(scope="module")
def stock(checkout, tmp_path_factory) -> Path:
    """A copy of the tag: the scripts and the package."""
    wanted = [":(glob)*.py", "megatron"]
    packed = _git("archive", "--format=tar", TAG, *wanted, cwd=checkout)
    if packed.returncode:
        pytest.skip(f"{checkout} has no tag {TAG}: {packed.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("stock")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def patched(stock, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("patched") / "Megatron-LM"
    shutil.copytree(stock, folder)
    done = _apply(folder, "--verbose")
    assert done.returncode == 0, done.stderr.decode()
    assert b"offset" not in done.stderr, done.stderr.decode()
    return folder


def _has_patch(tree: Path) -> bool:
    return _apply(tree, "--reverse", "--check").returncode == 0


def test_patch_applies_strictly_and_is_still_needed(checkout, stock, patched, tmp_path):
    assert _has_patch(patched), "the check for `already upstream` cannot succeed"
    assert not _has_patch(stock)
    shown = _git("show", f"HEAD:{SCRIPT}", cwd=checkout)
    assert shown.returncode == 0, shown.stderr
    (tmp_path / SCRIPT).write_bytes(shown.stdout)
    assert not _has_patch(tmp_path), f"{checkout} has {PATCH.name} already: delete me"


@pytest.fixture(scope="module")
def runnable(patched) -> Path:
    """The patched copy, where its start-up `make` can work."""
    missing = [tool for tool in ("make", "g++") if shutil.which(tool) is None]
    if importlib.util.find_spec("pybind11") is None:
        missing.append("pybind11")
    if missing:
        pytest.skip(f"Megatron-LM compiles a helper at start-up: needs {', '.join(missing)}")
    return patched


def _environment(tree: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(tree),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _torchrun(tree: Path, num_processes: int, argv: list[str]) -> subprocess.CompletedProcess:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, f"--nproc-per-node={num_processes}", str(tree / SCRIPT), *argv],
        cwd=tree,
        env=_environment(tree),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _step_log(folder: Path) -> list[list[dict]]:
    """Per rank, one record a step, without times."""
    ranks = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        ranks.append(
            [
                [(m["level"], m["loss_sum"], m["trained_tokens"]) for m in record["microbatches"]]
                for record in records
            ]
        )
    return ranks


def test_patched_script_trains_as_the_module_does(runnable, cluster, tmp_path):
    """4 processes, 3 steps, CP 1 and 2 in every step; the wheel's loop gives the same losses."""
    lens = [40, 30, 64, 20, 100, 128, 120, 64, 64, 32, 32, 10, 90, 64, 60, 50, 120, 30, 20, 64] * 2
    corpus = handmade.random_corpus(tmp_path / "corpus", lens)
    argv = [
        *MODEL,
        *("--global-batch-size", "8", "--train-iters", "3"),
        *("--hbp-level", "64:1", "--hbp-level", "128:2"),
        *("--hbp-corpus", str(corpus.path), "--hbp-step-log"),
    ]
    done = _torchrun(runnable, 4, [*argv, str(tmp_path / "script")])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"Megatron-Core version \.+ 0\.19\.1\n", done.stdout), "not the checkout's"
    assert list((runnable / "megatron" / "core" / "datasets").glob("helpers_cpp*"))
    assert "> hbp: levels 64:1 128:2" in done.stdout
    assert re.search(r"iteration\s+3/\s+3 ", done.stdout)

    cluster.run(4, "tests.distributed.jobs:train", argv=[*argv, str(tmp_path / "module")])
    script, module = _step_log(tmp_path / "script"), _step_log(tmp_path / "module")
    assert [len(steps) for steps in script] == [3, 3, 3, 3]
    assert {level for level, *_ in script[0][0]} == {"64:1", "128:2"}
    assert script == module


def test_patched_script_says_in_one_line_what_does_not_fit(runnable, tmp_path):
    corpus = handmade.random_corpus(tmp_path / "corpus", [64] * 8)
    argv = ["--global-batch-size", "1", "--hbp-level", "100:1", "--hbp-corpus", str(corpus.path)]
    done = _run_alone(runnable, [*MODEL, *argv])
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("megatron_hbp: error: level 100:1: PACK_LEN must be S x CP"), last
    assert "Traceback" not in done.stderr


# --hbp-device is a flag of ours: both scripts get the CPU runtime from outside
_ON_CPU = """
import runpy, sys
from megatron_hbp.host import cpu
cpu.install()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _run_alone(tree: Path, argv: list[str], *launch: str) -> subprocess.CompletedProcess:
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, *launch, str(tree / SCRIPT), *argv],
        cwd=tree,
        env=_environment(tree) | environment | {"MASTER_PORT": str(_free_port())},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _compile_helper(tree: Path) -> None:
    """As the host's start-up does, but for the Python that runs, whatever python3-config is."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    command = ["make", "-C", "megatron/core/datasets", f"LIBEXT={suffix}"]
    subprocess.run(command, cwd=tree, env=_environment(tree), check=True, capture_output=True)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_without_hbp_flags_the_original_path_is_taken(stock, runnable):
    """Mock data, 3 steps, one process: logged losses and norms are the unpatched script's."""
    argv = " ".join(MODEL)
    for ours in ("--hbp-device cpu", "--dataloader-type external"):
        assert ours in argv
        argv = argv.replace(ours, "")
    argv += " --mock-data --global-batch-size 2 --train-iters 3 --eval-iters 0"
    logged = []
    for tree in (stock, runnable):
        _compile_helper(tree)
        done = _run_alone(tree, argv.split(), "-c", _ON_CPU)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "building train, validation, and test datasets for GPT" in done.stdout
        assert "> hbp:" not in done.stdout
        steps = re.findall(
            r"lm loss: (\S+) \| loss scale: \S+ \| grad norm: (\S+)", done.stdout + done.stderr
        )
        assert len(steps) == 3
        logged.append(steps)
    assert logged[0] == logged[1]
