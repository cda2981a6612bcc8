"""CPU runtime: Megatron's CUDA calls run on CPU tensors, collectives over gloo.

A rehearsal tool: a cluster's flags, scaled down, run on a laptop before GPUs are booked. It
replaces `torch.cuda` functions and a few torch methods that would reach for a device; it never
touches Megatron. Speed, memory figures and low precision are not those of a GPU. `hbp check` names
another device to stand in: "meta", where tensors have shapes and no memory, in a machine described
by what its GPUs can do.

Guarantees:
- `install()` must come before megatron is imported, and says so when it does not; a second call
  changes nothing;
- a device that a caller names as CUDA becomes the CPU; everything else is left as it was.
"""

import collections
import contextlib
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_MEMORY_BYTES = 1 << 34  # reported as the device's memory
_installed: list[TorchFunctionMode] = []


class _CurrentDevice(str):
    """What `torch.cuda.current_device()` returns: the device that stands in, also where no
    TorchFunctionMode is active (re-entrant backward), yet formats as an index in `f"cuda:{...}"`.
    """

    def __format__(self, spec: str) -> str:
        return format(0, spec)


class _StandInMode(TorchFunctionMode):
    """Sends every factory call and every `.to` that names CUDA to the device that stands in."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def _moved(self, device: Any) -> Any:
        if isinstance(device, torch.device):
            return torch.device(self._device) if device.type == "cuda" else device
        if isinstance(device, str):
            return self._device if device.startswith("cuda") else str(device)
        if isinstance(device, int) and not isinstance(device, bool):
            return self._device
        return device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs) if kwargs else {}
        if kwargs.get("device") is not None:
            kwargs["device"] = self._moved(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1:
            if not isinstance(args[1], (torch.dtype, torch.Tensor)):
                args = (args[0], self._moved(args[1]), *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # the host groups gradients by the names of CUDA tensor types
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *args: Any) -> None: ...


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Properties:
    name = "cpu"
    total_memory = _MEMORY_BYTES
    multi_processor_count = os.cpu_count() or 1

    def __init__(self, capability: tuple[int, int]) -> None:
        self.major, self.minor = capability


def install(
    device: str = "cpu", *, capability: tuple[int, int] = (0, 0), device_count: int = 1
) -> None:
    """Replaces torch.cuda by `device`. Raises RuntimeError when megatron is imported already.

    capability: the compute capability (major, minor) that the host sees. device_count: GPUs of a
    node.
    """
    if _installed:
        return
    if any(name.split(".")[0] == "megatron" for name in sys.modules):
        raise RuntimeError("the CPU runtime must be installed before megatron is imported")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _replace_devices(device, capability, device_count)
    _replace_memory()
    _replace_random()
    _replace_tensor_methods()
    _replace_all_to_all()
    _replace_adamw_state()
    mode = _StandInMode(device)
    mode.__enter__()
    _installed.append(mode)


def _nothing() -> Any:
    """A new function that does nothing: torch.compile keeps a table of torch's functions by
    identity, so no two of them may be the same object.
    """
    return lambda *args, **kwargs: None


def _replace_devices(device: str, capability: tuple[int, int], device_count: int) -> None:
    cuda: Any = torch.cuda
    current = _CurrentDevice(device)
    properties = _Properties(capability)
    cuda.is_available = lambda: True
    cuda.device_count = lambda: device_count
    cuda.current_device = lambda: current
    cuda.set_device = _nothing()
    cuda.synchronize = _nothing()
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.current_stream = lambda *args, **kwargs: _Stream()
    cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_stream = _nothing()
    cuda.device = lambda *args: contextlib.nullcontext()
    cuda.get_device_capability = lambda *args: capability
    cuda.get_device_name = lambda *args: "cpu"
    cuda.get_device_properties = lambda *args: properties
    cuda.is_current_stream_capturing = lambda *args: False
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda._lazy_init = _nothing()
    cuda.nvtx.range_push = _nothing()
    cuda.nvtx.range_pop = _nothing()
    for dtype in ("Long", "Float", "Int", "Byte", "Double", "BFloat16", "Half"):
        setattr(cuda, f"{dtype}Tensor", getattr(torch, f"{dtype}Tensor"))
    accelerator: Any = torch.accelerator
    accelerator.current_device_index = lambda: 0
    accelerator.is_available = lambda: False


def _replace_memory() -> None:
    cuda: Any = torch.cuda
    cuda.empty_cache = _nothing()
    cuda.memory_stats = lambda *args, **kwargs: collections.defaultdict(int)
    cuda.reset_peak_memory_stats = _nothing()
    cuda.mem_get_info = lambda *args, **kwargs: (_MEMORY_BYTES, _MEMORY_BYTES)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.max_memory_reserved = lambda *args, **kwargs: 0


def _replace_random() -> None:
    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.manual_seed_all = _nothing()
    cuda.default_generators = [torch.default_generator]
    cuda.random.get_rng_state = cuda.get_rng_state
    torch._C._cuda_setRNGState = torch.default_generator.set_state


def _replace_tensor_methods() -> None:
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = _nothing()
    tensor.pin_memory = lambda self, *args, **kwargs: self
    module: Any = torch.nn.Module
    module.cuda = lambda self, *args, **kwargs: self


def _replace_all_to_all() -> None:
    """gloo wants contiguous tensors and split sizes as lists; NCCL takes what the host passes."""
    original = dist.all_to_all_single

    def all_to_all_single(
        output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        return original(
            output,
            input.contiguous(),
            _as_list(output_split_sizes),
            _as_list(input_split_sizes),
            group,
            async_op,
        )

    dist.all_to_all_single = all_to_all_single


def _replace_adamw_state() -> None:
    """Lets torch's AdamW be saved and loaded as TE's is: a distributed optimizer resumes.

    Without TE the host asks an optimizer that has not stepped yet for its step, and takes a step
    that is a tensor for a part of the parameter's state. So between steps it is a NumPy number.
    """
    adamw: Any = torch.optim.AdamW
    state_dict, load_state_dict, step = adamw.state_dict, adamw.load_state_dict, adamw.step

    def saved(self):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": np.float64(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        whole = state_dict(self)
        return whole | {"state": {key: _with_tensor_step(s) for key, s in whole["state"].items()}}

    def loaded(self, whole):
        load_state_dict(self, whole)
        for parameter, state in self.state.items():
            self.state[parameter] = _with_number_step(state)

    def stepped(self, closure=None):
        for parameter, state in self.state.items():
            self.state[parameter] = _with_tensor_step(state)
        loss = step(self, closure)
        for parameter, state in self.state.items():
            self.state[parameter] = _with_number_step(state)
        return loss

    adamw.state_dict, adamw.load_state_dict, adamw.step = saved, loaded, stepped


def _with_tensor_step(state: dict[str, Any]) -> dict[str, Any]:
    if "step" not in state:  # the host's own initial state has none
        return state
    return state | {"step": torch.tensor(state["step"], dtype=torch.float32)}


def _with_number_step(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"step": np.float64(state["step"])} if "step" in state else state


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes
