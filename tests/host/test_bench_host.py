"""The benchmark of the host: its counters count, its bars can be missed, its jobs run."""

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.host_counts import StepCounts
from benchmarks.host_overhead import overhead_bars, switch_bars
from benchmarks.host_table import median_bounds, switch_micros

ROOT = Path(__file__).resolve().parents[2]


def test_each_read_of_a_device_tensor_is_one_synchronisation():
    x = torch.tensor([0.0, 1.0, 2.0])
    with StepCounts() as counter:
        x.sum().item()
        bool(x.any())
        float(x[1])
        x.tolist()
        x.numpy()
        x.cpu()
        x.to("cpu")
        x.nonzero()
        x[x > 0.5]
        x.to(torch.float64)
        x + 1
    assert counter.result()["syncs"] == {
        "boolean index": 1,
        "cpu": 2,
        "item": 3,
        "nonzero": 1,
        "numpy": 1,
        "tolist": 1,
    }
    assert counter.result()["collectives"] == {}
    x.tolist()  # outside: not counted, and torch is as it was
    assert counter.syncs["tolist"] == 1
    assert "tolist" not in vars(torch.Tensor)


def test_reads_of_host_tensors_and_of_what_comes_from_them_are_left_out():
    bounds, x = torch.tensor([0, 3, 8]), torch.tensor([1.0, 2.0])
    with StepCounts([bounds]) as counter:
        bounds.tolist()
        (bounds[1:] - bounds[:-1]).tolist()
        (bounds[1:] * x).tolist()  # what a device tensor went into is on the device
    assert counter.result()["syncs"] == {"tolist": 1}


def test_reads_in_backward_are_counted():
    x = torch.ones(3, requires_grad=True)
    y = (x * 2).sum()
    y.register_hook(lambda grad: grad * grad.item())
    with StepCounts() as counter:
        y.backward()
    assert counter.result()["syncs"] == {"item": 1}


def _counts() -> dict:
    return {"collectives": {"allreduce": 2}, "syncs": {"item": 1}, "bytes_sent": 64}


def _overhead(seconds: float = 1.04) -> dict:
    return {
        "times": {"bare": {"wall": [1.0, 1.0, 1.0]}, "hbp": {"wall": [0.9, seconds, 2.0]}},
        "counts": {"bare": _counts(), "hbp": _counts()},
        "losses_equal": True,
    }


def test_bars_of_the_overhead():
    assert list(overhead_bars(_overhead()).values()) == [True] * 4
    assert list(overhead_bars(_overhead(1.06)).values()) == [False, True, True, True]
    for place, (key, value) in {
        1: ("collectives", {"allreduce": 3}),
        2: ("syncs", {"item": 1, "tolist": 1}),
    }.items():
        result = _overhead()
        result["counts"]["hbp"][key] = value
        found = list(overhead_bars(result).values())
        assert found == [i != place for i in range(4)]
    assert not all(overhead_bars(_overhead() | {"losses_equal": False}).values())


def test_bars_of_a_switch():
    rank = {
        "counts": {"grouped": _counts(), "in turn": _counts()},
        "losses": {"grouped": {"lm loss": 7.0}, "in turn": {"lm loss": 7.0}},
        "groups": [25, 25],
    }
    assert all(switch_bars([rank, rank]).values())
    for place, path, value in (
        (0, ("groups", 1), 26),
        (1, ("counts", "in turn", "bytes_sent"), 65),
        (2, ("counts", "in turn", "syncs"), {"item": 2}),
        (3, ("losses", "in turn", "lm loss"), 7.00001),
    ):
        other = deepcopy(rank)
        holder = other
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        assert list(switch_bars([rank, other]).values()) == [i != place for i in range(4)]


def test_time_of_a_switch_is_of_the_slowest_rank():
    ranks = [
        {
            "times": {"grouped": {"wall": [1.0, 2.0]}, "in turn": {"wall": [1.0, 2.0]}},
            "switches": {"grouped": 1, "in turn": 7},
        },
        {"times": {"grouped": {"wall": [0.5, 1.5]}, "in turn": {"wall": [1.6, 2.6]}}},
    ]
    np.testing.assert_allclose(switch_micros(ranks, "wall"), [1e5, 1e5])


def test_median_bounds_are_order_statistics():
    assert median_bounds(np.arange(40)[::-1]) == (13.0, 27.0)
    assert median_bounds(np.array([5.0])) == (5.0, 5.0)


@pytest.mark.slow
def test_bench_host_runs_and_counts_alike():
    """Both jobs end and every bar but the timed one is met."""
    pytest.importorskip("megatron.training", reason="needs the extra [train]")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.host_overhead", "--pairs", "3"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode in (0, 1), done.stderr
    for row in ("wall time, ms", "CPU time, ms", "collectives", "host synchronisations"):
        assert f"\n{row}  " in done.stdout, done.stdout + done.stderr
    bars = [line for line in done.stdout.splitlines() if line.startswith(("met ", "MISSED"))]
    assert len(bars) == 8
    assert [line for line in bars if line.startswith("MISSED") and "at most" not in line] == []
