"""Counts what a step sends, creates and waits for.

- Collectives: every c10d operator that torch dispatches, so a name imported early or a call from
  backward is seen too; with the bytes of the tensors that it is given to send.
- Process groups: all that this process has.
- Host synchronisations: what makes a GPU's host wait for a value: item, bool and other scalar
  reads, tolist, numpy, cpu, results whose shape depends on data, explicit synchronize.

On the CPU runtime every tensor lies on the CPU. So the caller names the tensors that would lie in
host memory on a GPU too; what is computed from them alone also does, until `.cuda()` or
`.to(device)` moves it. Reading those is no synchronisation.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

_DATA_DEPENDENT = {
    "aten::_local_scalar_dense": "item",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique",
    "aten::bincount": "bincount",
}
_READS = ("tolist", "numpy", "cpu")
_DEVICES = (torch.device, str, int)


class StepCounts(TorchDispatchMode):
    """Counts while it is entered. collectives and syncs: name -> calls."""

    def __init__(self, host_tensors: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.collectives: collections.Counter[str] = collections.Counter()
        self.syncs: collections.Counter[str] = collections.Counter()
        self.bytes_sent = 0
        self.counts_syncs = True
        self._host: dict[int, torch.Tensor] = {}  # keeps them alive: no address is used twice
        self._inside = False  # a torch function mode sends a method call through us again
        self._patches = contextlib.ExitStack()
        for tensor in host_tensors:
            self.leave_out(tensor)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """This tensor lies in host memory on a GPU too."""
        self._host[_storage(tensor)] = tensor

    def result(self) -> dict[str, Any]:
        return {
            "collectives": dict(sorted(self.collectives.items())),
            "syncs": dict(sorted(self.syncs.items())),
            "bytes_sent": self.bytes_sent,
        }

    def __enter__(self) -> "StepCounts":
        super().__enter__()
        for name in _READS:
            self._patch(torch.Tensor, name, functools.partial(self._on_read, name))
        for name in ("cuda", "to"):
            self._patch(torch.Tensor, name, functools.partial(self._on_move, name))
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            self._patch(owner, "synchronize", self._on_synchronize)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._patches.close()
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            self.collectives[name.removeprefix("c10d::").rstrip("_")] += 1
            self.bytes_sent += _sent_bytes(func, args)
        elif name in _DATA_DEPENDENT:
            self._count(_DATA_DEPENDENT[name], args[0])
        elif name == "aten::index" and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self._count("boolean index", args[0])
        result = func(*args, **(kwargs or {}))
        inputs = list(_tensors(args))
        if inputs and all(_storage(tensor) in self._host for tensor in inputs):
            for tensor in _tensors(result):
                self.leave_out(tensor)
        return result

    def _count(self, name: str, tensor: torch.Tensor) -> None:
        if self.counts_syncs and _storage(tensor) not in self._host:
            self.syncs[name] += 1

    def _patch(self, owner: Any, name: str, handler: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        inherited = name not in vars(owner)

        def patched(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside = True
            try:
                return handler(original, *args, **kwargs)
            finally:
                self._inside = False

        setattr(owner, name, patched)
        self._patches.callback(
            lambda: delattr(owner, name) if inherited else setattr(owner, name, original)
        )

    def _on_read(
        self, name: str, original: Any, tensor: torch.Tensor, *args: Any, **kw: Any
    ) -> Any:
        self._count(name, tensor)
        return original(tensor, *args, **kw)

    def _on_move(
        self, name: str, original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(tensor, *args, **kwargs)
        given = (*args, *kwargs.values())
        if any(type(arg) is str and arg == "cpu" for arg in given):
            self._count("cpu", tensor)
            return result
        names_device = name == "cuda" or any(isinstance(arg, _DEVICES) for arg in given)
        if names_device and result is tensor and _storage(tensor) in self._host:
            return _elsewhere(tensor)
        return result

    def _on_synchronize(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.syncs["synchronize"] += 1
        return original(*args, **kwargs)


def num_process_groups() -> int:
    """Process groups that this process has."""
    assert dist.is_initialized()
    return len(distributed_c10d._world.pg_map)


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose memory is its own: what `.cuda()` returns on a GPU."""
    return torch.from_numpy(tensor.detach().numpy().copy())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _sent_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes of the tensors that the operator reads; outputs, where named apart, are not sent."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False))
    inputs = [value for name, value in given.items() if name.startswith("input")]
    return sum(t.numel() * t.element_size() for t in _tensors(inputs or list(given.values())))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _tensors(element)
