"""Devices: what a GPU and its links can do.

Guarantees (asserted by tests/unit/test_hardware.py):
- a Device holds possible numbers only;
- find_device() knows every name in DEVICES and any JSON file with the same fields.
Nothing here looks at a real device.

Peaks are data sheet values, dense bf16. Efficiencies are assumptions, chosen so that predicted
speeds meet published ones (docs/profile.md lists them); a fitted profile replaces them.
"""

import json
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

# FLOP/s, bytes and bytes/s above this are of no device, and too large for a float's square.
_MOST = 1e30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU in its node. Raises ValueError for a value that no device has.

    memory_bytes: what a process can allocate. peak_flops: FLOP/s, dense bf16. matmul_efficiency,
    attention_efficiency: the share of it that the linear part of a layer (its element-wise work
    included) and flash attention reach, above 0, at most 1. intra_node_bandwidth,
    inter_node_bandwidth: bytes/s of one GPU, one way, achieved. launch_seconds: fixed cost of a
    layer in every micro-batch, forward and backward together. compute_capability: major.minor,
    which decides what the host allows (FP8 from 8.9 on).
    """

    name: str
    memory_bytes: int
    peak_flops: float
    matmul_efficiency: float
    attention_efficiency: float
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    devices_per_node: int
    launch_seconds: float
    compute_capability: float = 9.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            where = f"device {self.name!r}: {field.name} is {value!r}"
            if field.type is str:
                if not isinstance(value, str) or not value:
                    raise ValueError(f"{where}; give it a text")
            elif isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{where}; give a number")
            elif field.type is int and (type(value) is not int or not 1 <= value < _MOST):
                raise ValueError(f"{where}; give a whole number of 1 or more")
            elif not 0 <= value < _MOST:
                raise ValueError(f"{where}; give a finite number of 0 or more")
            elif value == 0 and field.name != "launch_seconds":
                raise ValueError(f"{where}; give a number above 0")
            elif field.name.endswith("_efficiency") and value > 1:
                raise ValueError(f"{where}, a share of the peak; give at most 1")


# What large collectives reach of a link's peak. Published: NCCL 230 .. 250 of 300 GB/s on A100,
# all-to-all of DeepEP 726 of 900 GB/s on B200 and 43 .. 47 of 50 GB/s between nodes.
_LINK_EFFICIENCY = 0.8
# An assumption: launches of the kernels of one layer that computation does not hide.
_LAUNCH_SECONDS = 3e-4


def _device(
    name: str,
    gib: float,
    tflops: float,
    efficiency: tuple[float, float],
    links: tuple[float, float],
    *,
    capability: float,
) -> Device:
    """efficiency: of matrix products and of attention. links: peak GB/s of one GPU, one way, inside
    a node and between nodes."""
    return Device(
        name=name,
        memory_bytes=int(gib * 2**30),
        peak_flops=tflops * 1e12,
        matmul_efficiency=efficiency[0],
        attention_efficiency=efficiency[1],
        intra_node_bandwidth=links[0] * 1e9 * _LINK_EFFICIENCY,
        inter_node_bandwidth=links[1] * 1e9 * _LINK_EFFICIENCY,
        devices_per_node=8,
        launch_seconds=_LAUNCH_SECONDS,
        compute_capability=capability,
    )


# Memory: what PyTorch reports. FLOP/s and links: NVIDIA's data sheets (A100, H100 SXM, H200 SXM,
# HGX B200; NVLink 600, 900, 900, 1800 GB/s both ways) and DGX guides (one InfiniBand port a GPU:
# 200 Gb/s on DGX A100, 400 Gb/s on DGX H100, H200, B200). Efficiencies meet published speeds in
# bf16, see docs/profile.md.
_KNOWN = (
    _device("a100-80gb", 79.15, 312, (0.62, 0.55), (300, 25), capability=8.0),
    _device("h100-80gb", 79.11, 989, (0.55, 0.50), (450, 50), capability=9.0),
    _device("h200-141gb", 139.8, 989, (0.55, 0.50), (450, 50), capability=9.0),
    _device("b200-192gb", 178.35, 2250, (0.50, 0.45), (900, 50), capability=10.0),
)

DEVICES = {device.name: device for device in _KNOWN}


def find_device(text: str) -> Device:
    """The device named `text` (any case), or described by the JSON file `text`.

    Raises ValueError for an unknown name, with all names, and for a file that does not hold the
    fields of Device; those with a default may be left out.
    """
    known = DEVICES.get(text.strip().lower())
    if known is not None:
        return known
    path = Path(text)
    if not path.is_file():
        raise ValueError(
            f"device {text!r} is neither a known name nor a JSON file; known: {', '.join(DEVICES)}"
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"device file {path} is not JSON: {error}") from None
    wanted = {field.name for field in fields(Device)}
    needed = {field.name for field in fields(Device) if field.default is MISSING}
    found = set(document) if isinstance(document, dict) else set()
    if not needed <= found <= wanted:
        parts = [f"{name} is missing" for name in sorted(needed - found)]
        parts += [f"{name} is unknown" for name in sorted(found - wanted)]
        raise ValueError(
            f"device file {path}: {', '.join(parts)}; give one object with {sorted(wanted)}"
        )
    try:
        return Device(**document)
    except ValueError as error:
        raise ValueError(f"device file {path}: {error}") from None
