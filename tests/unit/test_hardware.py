"""Devices: known ones, files, and what no device has."""

import json
from dataclasses import asdict, replace

import pytest

from megatron_hbp.hardware import DEVICES, find_device


def test_peaks_and_memory_of_the_data_sheets():
    peaks = {name: device.peak_flops / 1e12 for name, device in DEVICES.items()}
    assert peaks == {"a100-80gb": 312, "h100-80gb": 989, "h200-141gb": 989, "b200-192gb": 2250}
    for name, device in DEVICES.items():
        gigabytes = int(name.split("-")[1].removesuffix("gb"))
        # a process cannot have all that is sold
        assert 0.97 * gigabytes * 1e9 < device.memory_bytes < 1.08 * gigabytes * 1e9
        assert device.intra_node_bandwidth > device.inter_node_bandwidth


def test_names_in_any_case_and_unknown_ones():
    assert find_device(" H100-80GB") is DEVICES["h100-80gb"]
    with pytest.raises(ValueError, match=r"'v100' is neither .*a100-80gb, h100-80gb, .*b200"):
        find_device("v100")


def test_a_file_is_a_device(tmp_path):
    mine = replace(DEVICES["h100-80gb"], name="mine", inter_node_bandwidth=12e9)
    (tmp_path / "mine.json").write_text(json.dumps(asdict(mine)))
    assert find_device(str(tmp_path / "mine.json")) == mine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes is 0; give a whole number of 1 or more"),
        ({"memory_bytes": 8.5e10}, "memory_bytes is 85000000000.0; give a whole number"),
        ({"peak_flops": float("nan")}, "peak_flops is nan; give a finite number"),
        ({"peak_flops": True}, "peak_flops is True; give a number"),
        ({"peak_flops": 10**400}, "peak_flops is 10*; give a finite number"),
        ({"memory_bytes": 10**400}, "memory_bytes is 10*; give a whole number"),
        ({"inter_node_bandwidth": 0}, "inter_node_bandwidth is 0; give a number above 0"),
        ({"launch_seconds": -1.0}, "launch_seconds is -1.0; give a finite number"),
        ({"matmul_efficiency": 1.2}, "matmul_efficiency is 1.2, a share of the peak"),
        ({"name": ""}, "name is ''; give it a text"),
        ({"name": 5}, "name is 5; give it a text"),
    ],
)
def test_impossible_devices_are_refused(tmp_path, change, message):
    document = asdict(DEVICES["h100-80gb"]) | change
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message) as error:
        find_device(str(tmp_path / "bad.json"))
    assert "bad.json" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 5000, "is not JSON"),
        ("[]", "memory_bytes is missing"),
        ('{"name": "x", "speed": 1}', r"peak_flops is missing, speed is unknown"),
    ],
)
def test_files_that_hold_no_device(tmp_path, text, message):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_device(str(tmp_path / "bad.json"))
