"""The CPU runtime: what is asked of CUDA happens on the CPU, everything else is left alone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_it_must_come_before_megatron():
    done = _run(
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core');"
        "from megatron_hbp.host import cpu; cpu.install()"
    )
    assert done.returncode == 1
    assert (
        "RuntimeError: the CPU runtime must be installed before megatron is imported" in done.stderr
    )


def test_importing_it_changes_nothing():
    done = _run(
        "import torch; before = torch.cuda.current_device, torch.Tensor.cuda;"
        "from megatron_hbp.host import cpu;"
        "assert (torch.cuda.current_device, torch.Tensor.cuda) == before; print('same')"
    )
    assert done.stdout == "same\n", done.stderr


def test_a_second_install_changes_nothing(cluster):
    (same,) = cluster.run(1, "tests.distributed.jobs_cpu:second_install")
    assert same


@pytest.fixture(scope="module")
def facts(cluster):
    (found,) = cluster.run(1, "tests.distributed.jobs_cpu:facts")
    return found


def test_cuda_devices_become_the_cpu(facts):
    assert facts["factories"] == {"cpu"}
    assert facts["moves"] == {"cpu"}
    assert facts["available"] == (True, 1)


def test_other_devices_and_types_are_left_alone(facts):
    assert facts["meta"] == ("meta", "meta")
    assert facts["dtypes"] == ("torch.float64", "torch.float64", "torch.float16")


def test_the_current_device_formats_as_an_index_and_is_one(facts):
    assert facts["formatted"] == "cuda:0"
    assert facts["tensor type"] == "torch.cuda.FloatTensor"


def test_factories_work_in_reentrant_backward(facts):
    """No TorchFunctionMode is active there, so the device itself must be the CPU."""
    assert facts["devices in backward"] == ["cpu"]
    assert facts["gradient"] == 2.0


def test_random_state_is_that_of_the_cpu(facts):
    first, second, seeded = facts["random"]
    assert first == second
    assert seeded[0] == seeded[1]


def test_streams_events_and_memory_answer(facts):
    assert facts["elapsed"] == 0.0
    assert facts["memory"] == (0, 0)


def test_all_to_all_takes_views_and_tensors_of_sizes(cluster):
    """Non-contiguous input and split sizes as tensors, as the host's token dispatcher passes."""
    received = cluster.run(2, "tests.distributed.jobs_cpu:all_to_all")
    assert received == [[0.0, 100.0], [1.0, 2.0, 101.0, 102.0]]
