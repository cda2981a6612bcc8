"""Training that also reports what attention saw, trained tokens and groups made, per rank."""

import sys
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_hbp.host import pretrain_gpt
from megatron_hbp.host.attention import UlyssesAttention
from megatron_hbp.host.forward import ForwardStep
from tests.distributed.jobs import Recorder


class Watch:
    """Listens inside this rank's process. Patches classes, which the job's end throws away."""

    def __init__(self, loss_scale: float) -> None:
        self.visits: list[dict[str, Any]] = []
        self.trained: dict[int, int] = {}
        self.groups: list[tuple[str, list[int]]] = []
        self._loss_scale = loss_scale
        self._watch_attention()
        self._watch_loss()
        self._watch_groups()

    def _watch_attention(self) -> None:
        original = UlyssesAttention.forward

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            pack = kwargs["packed_seq_params"]
            group = pack.pack_cp_group
            self.visits.append(
                {
                    "layer": module.layer_number,
                    "with_graph": torch.is_grad_enabled(),
                    "cu_seqlens": pack.pack_cu_seqlens.tolist(),
                    "max_seqlen": pack.pack_max_seqlen,
                    "host_bounds": pack.cu_seqlens_q.tolist(),
                    "host_padded_bounds": pack.cu_seqlens_q_padded,
                    "host_group": pack.cp_group,
                    "positions": (int(pack.local_positions[0]), len(pack.local_positions)),
                    "cp_size": pack.pack_cp_size,
                    "tokens": kwargs["query"].shape[0] if "query" in kwargs else args[0].shape[0],
                    "members": []
                    if group is None
                    else torch.distributed.get_process_group_ranks(group),
                }
            )
            return original(module, *args, **kwargs)

        UlyssesAttention.forward = forward

        constructor = UlyssesAttention.__init__

        def init(module: Any, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
            constructor(module, config, layer_number, *args, **kwargs)
            module.layer_number = layer_number

        UlyssesAttention.__init__ = init

    def _watch_loss(self) -> None:
        original = ForwardStep._loss

        def loss(forward_step: Any, item: Any, batch: Any, losses: Any) -> Any:
            value, count, report = original(forward_step, item, batch, losses)
            self.trained[item["step"]] = self.trained.get(item["step"], 0) + int(count)
            return value * self._loss_scale, count, report

        ForwardStep._loss = loss

    def _watch_groups(self) -> None:
        original = parallel_state.create_group

        def create_group(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("group_desc")).startswith("HBP_CP"):
                self.groups.append((kwargs["group_desc"], list(kwargs["ranks"])))
            return original(*args, **kwargs)

        parallel_state.create_group = create_group


def train(argv: list[str], with_gradients: bool = False, loss_scale: float = 1.0) -> dict[str, Any]:
    """One training run. loss_scale multiplies the main loss only (0.0: auxiliary losses alone)."""
    sys.argv = ["pretrain_gpt", *argv]
    watch = Watch(loss_scale)
    recorder = Recorder(with_gradients)
    pretrain_gpt.main()
    return recorder.result() | {
        "visits": watch.visits,
        "trained": [watch.trained[step] for step in sorted(watch.trained)],
        "groups": watch.groups,
    }
