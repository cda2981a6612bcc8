"""Training that brings back every collective of every rank: which group, what kind, in which order.

Listens below torch.distributed's functions, at the process groups' own methods, so that nothing
that the host or torch calls by another name is missed.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.training import training as host_training

from megatron_hbp.host import pretrain_gpt

# The methods of a process group by what they do; torch renamed some of them after 2.10.
_METHODS = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": (
        "allgather",
        "allgather_coalesced",
        "_allgather_base",
        "all_gather_single",
        "allgather_into_tensor_coalesced",
        "all_gather_single_coalesced",
    ),
    "reduce_scatter": (
        "reduce_scatter",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
    ),
    "all_to_all": ("alltoall_base", "all_to_all_single", "alltoall"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "gather": ("gather", "gather_single", "gather_into_tensor"),
    "scatter": ("scatter",),
    "barrier": ("barrier", "monitored_barrier"),
    "send": ("send",),
    "recv": ("recv", "recv_anysource"),
}


class CollectiveRecorder:
    """Patches classes and functions of this rank's process, which the job's end throws away.

    events: (work, ranks of the group, kind, peer's global rank or -1), in order. work: "start",
    "forward CHUNK MICROBATCH", "backward CHUNK MICROBATCH", "step" (between works), "end" (after
    the last backward). Training steps follow each other after a "next step".
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[int, ...], str, int]] = []
        self._work = "start"
        self._in_step = False
        for kind, methods in _METHODS.items():
            for method in methods:
                if hasattr(dist.ProcessGroup, method):
                    self._wrap_method(method, kind)
        self._wrap_work()

    def _wrap_method(self, method: str, kind: str) -> None:
        original = getattr(dist.ProcessGroup, method)

        def recorded(group: Any, *args: Any, **kwargs: Any) -> Any:
            members = tuple(dist.get_process_group_ranks(group))
            if len(members) == 1:  # nobody to agree with
                return original(group, *args, **kwargs)
            peer = members[args[1]] if kind in ("send", "recv") else -1
            self.events.append((self._work, members, kind, peer))
            return original(group, *args, **kwargs)

        setattr(dist.ProcessGroup, method, recorded)

    def _wrap_work(self) -> None:
        forward, backward = schedules.forward_step, schedules.backward_step
        train_step = host_training.train_step

        def forward_step(
            function: Any, iterator: Any, model: Any, *args: Any, **kwargs: Any
        ) -> Any:
            return self._during("forward", forward, function, iterator, model, *args, **kwargs)

        def backward_step(*args: Any, **kwargs: Any) -> Any:
            return self._during("backward", backward, *args, **kwargs)

        def recorded_step(*args: Any, **kwargs: Any) -> Any:
            self.events.append(("next step", (), "", -1))
            return self._during("step", train_step, *args, **kwargs)

        schedules.forward_step, schedules.backward_step = forward_step, backward_step
        host_training.train_step = recorded_step

    def _during(self, work: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        before, self._work = self._work, work
        if work != "step":
            self.events.append((work, (), "begins", -1))
        try:
            return function(*args, **kwargs)
        finally:
            self._work = "after" if work == "step" else before


def train(argv: list[str]) -> dict[str, Any]:
    """One training run: {"events": ...} of this rank."""
    sys.argv = ["pretrain_gpt", *argv]
    recorder = CollectiveRecorder()
    pretrain_gpt.main()
    return {"events": recorder.events, "torch": torch.__version__}
