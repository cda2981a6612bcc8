"""What the CPU runtime answers, in a process that has it (the zygote installs it)."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_hbp.host import cpu


def second_install() -> bool:
    """Whether all that it replaces is the same object after another call."""
    names = ("current_device", "is_available", "Stream", "get_rng_state", "LongTensor")
    before = [getattr(torch.cuda, name) for name in names] + [dist.all_to_all_single]
    cpu.install()
    after = [getattr(torch.cuda, name) for name in names] + [dist.all_to_all_single]
    return all(a is b for a, b in zip(before, after, strict=True))


def facts() -> dict[str, Any]:
    """Answers of torch under the runtime, by topic."""
    ones = torch.ones(2)
    found: dict[str, Any] = {}
    devices: list[Any] = ["cuda", "cuda:3", 0, torch.device("cuda", 1), torch.cuda.current_device()]
    found["factories"] = {torch.zeros(1, device=device).device.type for device in devices}
    found["moves"] = {ones.to(device).device.type for device in devices}
    found["moves"] |= {ones.cuda().device.type, torch.nn.Linear(1, 1).cuda().weight.device.type}
    found["available"] = (torch.cuda.is_available(), torch.cuda.device_count())
    found["meta"] = (torch.empty(1, device="meta").device.type, ones.to("meta").device.type)
    found["dtypes"] = tuple(
        str(x.dtype)
        for x in (ones.to(torch.float64), ones.to(torch.zeros(1).double()), ones.type(torch.half))
    )
    found["formatted"] = f"cuda:{torch.cuda.current_device()}"
    found["tensor type"] = ones.type()
    found |= _backward()

    state = torch.cuda.get_rng_state()
    first = torch.rand(3).tolist()
    torch.cuda.set_rng_state(state)
    second = torch.rand(3).tolist()
    seeded = []
    for _ in range(2):
        torch.cuda.manual_seed(5)
        seeded.append(torch.rand(3).tolist())
    found["random"] = (first, second, seeded)

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
    end.record()
    torch.cuda.synchronize()
    found["elapsed"] = start.elapsed_time(end)
    found["memory"] = (torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved())
    return found


def _backward() -> dict[str, Any]:
    devices = []

    def function(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # recomputed, inside backward
            made = torch.zeros(1, device=torch.cuda.current_device())
            devices.append(made.device.type)
        return x * 2

    x = torch.ones(1, requires_grad=True)
    checkpoint(function, x, use_reentrant=True).sum().backward()
    return {"devices in backward": devices, "gradient": float(x.grad)}


def all_to_all() -> list[float]:
    """Rank r sends one number to rank 0 and two to rank 1; returns what it received."""
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    numbers = torch.arange(3.0) + 100 * rank
    strided = torch.stack([numbers, numbers], dim=1)[:, 0]
    assert not strided.is_contiguous()
    received = torch.empty(2 * (1 + rank))
    dist.all_to_all_single(
        received,
        strided,
        torch.tensor([1 + rank, 1 + rank]),
        torch.tensor([1, 2]),
    )
    return received.tolist()
