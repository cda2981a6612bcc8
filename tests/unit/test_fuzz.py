"""The fuzz target: kernels under address and undefined-behaviour sanitizers, on random inputs."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = "-fsanitize=address,undefined"


def _run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def fuzz_target(tmp_path_factory):
    for tool in ("make", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    folder = tmp_path_factory.mktemp("sanitizers")
    (folder / "empty.cpp").write_text("int main() { return 0; }\n")
    program = folder / "empty"
    if _run("c++", SANITIZERS, str(folder / "empty.cpp"), "-o", str(program)).returncode:
        pytest.skip(f"the C++ compiler cannot link {SANITIZERS}")
    built = _run("make", "-j2", "build/fuzz/fuzz_packing", "CXX=c++")
    assert built.returncode == 0, built.stderr[-4000:]
    return ROOT / "build" / "fuzz" / "fuzz_packing"


def test_no_kernel_violates_an_invariant(fuzz_target):
    done = _run(str(fuzz_target), "--seed", "1", "--runs", "15000", "--seconds", "60")
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > 100
    assert "runs without a violation" in done.stdout


def test_wrong_arguments_are_refused(fuzz_target):
    for arguments in (["--second", "1"], ["--runs"], ["--runs", "x"]):
        done = _run(str(fuzz_target), *arguments)
        assert done.returncode == 2
        assert "fuzz_packing [--seconds S]" in done.stderr
