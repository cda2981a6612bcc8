"""`hbp simulate`: tables and JSON, other methods beside the plan, a step log, wrong use."""

import json

import numpy as np
import pytest

from megatron_hbp import Level, Plan, build_plan
from megatron_hbp.cli import main
from megatron_hbp.cost_model import analytic
from megatron_hbp.hardware import find_device
from megatron_hbp.models import find_model
from megatron_hbp.run_layout import RunLayout
from megatron_hbp.simulate import simulate

LEVELS = (Level(4096, 1, 32), Level(16384, 4, 32))
NAMED = ["--model", "llama-3.1-8b", "--device", "h100-80gb"]
METHODS = [
    "HBP",
    "levels, unbalanced",
    "16384:4 isf",
    "16384:4 best_fit",
    "16384:4 first_fit_decreasing",
    "16384:4 best_fit_decreasing",
    "16384:4 in order",
    "16384:4 random",
    "16384:4 sorted",
    "online",
    "online, no lockstep",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(0)
    short = np.clip(rng.lognormal(6, 1, 3000), 2, 4096).astype(np.int64)
    lens = np.concatenate([short, rng.integers(4097, 16385, 40)])
    path = tmp_path_factory.mktemp("plans") / "plan"
    build_plan(lens, LEVELS, 8, 4, 2, epochs=2).save(path)
    return str(path)


def _run(capsys, *argv):
    assert main(["simulate", *argv]) == 0
    return capsys.readouterr()


def _json(capsys, *argv):
    return json.loads(_run(capsys, *argv, "--json").out)


def _error(capsys, *argv):
    assert main(["simulate", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_json_is_the_time_line(folder, capsys):
    document = _json(capsys, folder, *NAMED, "--tp", "2")
    layout = RunLayout(num_ranks=8, num_microbatches=4, num_stages=2, tp_size=2)
    cost = analytic(find_model("llama-3.1-8b"), find_device("h100-80gb"), layout)
    timeline = simulate(Plan.load(folder), cost)
    assert document["world_size"] == 32
    assert document["gpu_days"] == timeline.gpu_days
    assert document["steps"] == timeline.num_steps
    assert document["step_seconds"]["mean"] == pytest.approx(timeline.seconds.mean())
    assert document["step_seconds"]["p99"] >= document["step_seconds"]["p50"]
    assert sum(document["shares"].values()) == pytest.approx(1)
    assert document["shares"]["tp_communication"] > 0
    assert document["shares"]["moe_communication"] == 0
    assert [level["level"] for level in document["levels"]] == ["4096:1:32", "16384:4:32"]
    # seconds of a micro-batch and rank, times micro-batches, are the time of all ranks
    total = 0.0
    for level in document["levels"]:
        parts = "compute cp_communication tp_communication moe_communication wait bubble".split()
        total += sum(level[part] for part in parts) * level["microbatches"]
    rest = timeline.step_wait.mean(axis=1).sum() + timeline.reduction.sum()
    assert total + rest == pytest.approx(timeline.total_seconds)
    assert document["levels"][0]["memory_bytes"] == cost.memory(LEVELS[0]).total
    assert "compare" not in document
    assert "measured" not in document


def test_the_tables(folder, capsys):
    out = _run(capsys, folder, *NAMED).out
    assert out.startswith("llama-3.1-8b on 16 x h100-80gb: ")
    for text in ("step seconds: mean ", "MFU ", "share of the time", "by level", "ranks wait "):
        assert text in out
    assert "4096:1:32" in out
    assert "does not fit" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_memory_that_does_not_fit_is_told(folder, capsys):
    out = _run(capsys, folder, "--model", "llama-3.1-70b", "--device", "h100-80gb").out
    assert out.count("does not fit") == 2


def test_other_methods_for_the_same_tokens(folder, capsys):
    document = _json(capsys, folder, *NAMED, "--compare")
    compared = document["compare"]
    assert list(compared) == METHODS
    assert compared["HBP"]["gpu_days"] == document["gpu_days"]
    for found in compared.values():
        assert sum(found["shares"].values()) == pytest.approx(1)
        # equal useful work: GPU-days and MFU are two sides of one thing
        useful = found["gpu_days"] * found["model_flops_utilization"]
        assert useful == pytest.approx(document["gpu_days"] * document["model_flops_utilization"])
    assert compared["16384:4 isf"]["gpu_days"] > document["gpu_days"]
    assert compared["16384:4 sorted"]["mixing_ratio"] > 2 * compared["HBP"]["mixing_ratio"]
    first, second = document["saving"].splitlines()
    saved = 1 - document["gpu_days"] / compared["16384:4 isf"]["gpu_days"]
    assert "single-level packing (16384:4 isf" in first
    assert f"{saved:.0%}" in first
    best = min(METHODS[1:], key=lambda name: compared[name]["gpu_days"])
    assert f"the best other method ({best}, " in second


def test_the_comparison_as_tables(folder, capsys):
    out, err = _run(capsys, folder, *NAMED, "--compare")
    for method in METHODS:
        assert f"\n{method}  " in out
    assert max(map(len, out.splitlines())) <= 100
    assert "comparing with online (" in err


def test_a_method_that_cannot_run_is_told(tmp_path, capsys):
    """56 heads on CP 2 are fine; online scheduling needs CP 16 for the longest."""
    lens = np.concatenate([np.full(400, 500), [16000]])
    plan = build_plan(lens, [Level(1024, 1), Level(28672, 28)], 56)
    plan.save(tmp_path / "plan")
    arguments = tmp_path / "model.sh"
    arguments.write_text(
        "--num-layers 4 --hidden-size 448 --num-attention-heads 56 --ffn-hidden-size 896 "
        "--vocab-size 1000 --swiglu --untie-embeddings-and-output-weights"
    )
    argv = [str(tmp_path / "plan"), "--model", str(arguments), "--device", "h100-80gb"]
    compared = _json(capsys, *argv, "--compare")["compare"]
    assert "CP size 16" in compared["online"]["impossible"]
    assert compared["28672:28 isf"]["gpu_days"] > 0
    out = _run(capsys, *argv, "--compare").out
    assert "online: cannot run: " in out


def test_a_step_log_beside_the_prediction(folder, tmp_path, capsys):
    plan = Plan.load(folder)
    name = plan.hash()[:12]
    for rank in range(8):
        lines = [{"plan": name, "start": 0, "rank": rank}]
        for step in range(4):
            microbatches = [{"sequences": [], "cpu_seconds": 1.0}] * 4
            lines.append(
                {"plan": name, "step": step, "rank": rank, "wall_seconds": 7.0 + step}
                | {"microbatches": microbatches}
            )
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"rank-{rank:05d}.jsonl").write_text(text)
    measured = _json(capsys, folder, *NAMED, "--step-log", str(tmp_path))["measured"]
    assert measured["measured"] == [7, 8, 9, 10]
    assert len(measured["predicted"]) == 4
    assert "4 steps logged" in _run(capsys, folder, *NAMED, "--step-log", str(tmp_path)).out


def test_wrong_use(folder, tmp_path, capsys):
    assert "no plan" in _error(capsys, str(tmp_path), *NAMED)
    assert "--ranks is 4, the plan has 8" in _error(capsys, folder, *NAMED, "--ranks", "4")
    message = _error(capsys, folder, "--model", "gpt", "--device", "h100-80gb")
    assert "known: llama-3.1-8b" in message
    assert "known: a100-80gb" in _error(capsys, folder, *NAMED[:2], "--device", "v100")
    assert "--model is missing" in _error(capsys, folder)
    assert "no rank-*.jsonl" in _error(capsys, folder, *NAMED, "--step-log", str(tmp_path))
    assert "TP 64 does not divide" in _error(capsys, folder, *NAMED, "--tp", "64")
