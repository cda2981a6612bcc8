"""`hbp check` as a user calls it: exit codes, text, JSON, one rank."""

import json
import os

import numpy as np
import pytest

from megatron_hbp import cli
from tests.host.test_preflight import GPU, LAYOUT, MODEL, WITHOUT_CORPUS

pytest.importorskip("megatron.training", reason="needs the extra [train]")

FLAGS = [*GPU, *MODEL, *LAYOUT, *WITHOUT_CORPUS]


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    """The command on 16 GPUs, in an empty folder that must stay empty; (code, text, error)."""
    np.save(tmp_path / "lengths.npy", np.array([60, 33, 45, 120] * 40, dtype=np.int32))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")

    def run(*options, more=(), machine=("--gpus", "16", "--device", "h100-80gb")):
        words = ["check", *machine, "--lengths", str(tmp_path / "lengths.npy"), *options]
        code = cli.main([*words, "--", *FLAGS, *more])
        out, err = capsys.readouterr()
        assert os.listdir() == []
        return code, out, err

    return run


def test_a_run_that_fits(check):
    code, text, error = check("--rank", "13")
    assert (code, error) == (0, "")
    assert text.splitlines()[-1].startswith("fits")
    assert "rank 13 (node 1, TP rank 1, stage 1, place 2" in text


def test_json_and_warnings_that_count(check):
    """4 GPUs a node: CP groups of 2 over TP 2 just fit; 2 GPUs: they cross."""
    machine = ("--gpus", "16", "--device", "h100-80gb", "--gpus-per-node", "2")
    code, text, _ = check("--json", "--strict", machine=machine)
    document = json.loads(text)
    assert code == 1
    assert not document["fits"]
    assert document["problems"] == document["warnings"]
    assert any("CP groups of size 2 span" in warning for warning in document["warnings"])
    assert document["rank"] is None


def test_a_run_that_would_not_start(check):
    """--rank does not hide why."""
    more = ["--save", "checkpoints", "--micro-batch-size", "2"]
    code, text, error = check("--rank", "3", more=more)
    assert (code, error) == (1, "")
    lines = text.splitlines()
    assert lines[-1] == "does not fit: 1 problem"
    assert lines[-2].startswith("PROBLEM: --micro-batch-size is 2; with HBP it must be 1")


@pytest.mark.parametrize(
    ("options", "machine", "text"),
    [
        ([], ("--gpus", "16"), "--device is missing"),
        ([], ("--device", "h100-80gb"), "--gpus is missing"),
        ([], ("--gpus", "1000000", "--device", "h100-80gb"), "--gpus is 1000000; give at most"),
        ([], ("--gpus", "16", "--device", "tpu"), "device 'tpu' is neither a known name"),
        (["--rank", "16"], ("--gpus", "16", "--device", "h100-80gb"), "--rank is 16"),
        (
            ["--transformer-engine", "newest"],
            ("--gpus", "16", "--device", "h100-80gb"),
            "--transformer-engine is 'newest'; give a release such as 2.8",
        ),
    ],
)
def test_wrong_use(check, options, machine, text):
    code, out, error = check(*options, machine=machine)
    assert (code, out) == (2, "")
    assert error.startswith(f"hbp: error: {text}")
    assert error.count("\n") == 1
