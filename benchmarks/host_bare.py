"""The least that a forward step can do on the same packs, to compare HBP's with.

Batches lie ready as tensors on the device, boundaries as Python ints. What is left is what
Megatron's own pretrain_gpt.py does with a packed batch: count its FLOPs, call the model, weigh the
token losses, check them for NaN. No data set, no checks of the pack, no log, no timers, no CP
group, no switch of recompute. CP 1 only.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_hbp.host.packed import HbpPackedSeqParams
from megatron_hbp.plan import Plan


@dataclass(frozen=True)
class BareBatch:
    """One micro-batch, ready; shapes as in `dataset.py`."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    loss_weights: torch.Tensor
    padding_mask: torch.Tensor
    num_trained: torch.Tensor
    cu_seqlens: torch.Tensor
    bounds: tuple[int, ...]
    num_documents: int
    max_seqlen: int

    @classmethod
    def of(cls, item: dict[str, Any]) -> "BareBatch":
        names = ("tokens", "labels", "positions", "loss_weights", "padding_mask", "num_trained")
        return cls(
            **{name: item[name].cuda() for name in names},
            cu_seqlens=item["cu_seqlens"].cuda(),
            bounds=tuple(item["cu_seqlens"].tolist()),
            num_documents=item["num_documents"],
            max_seqlen=item["max_seqlen"],
        )


class BareForwardStep:
    """For a plan whose levels are all CP 1."""

    def __init__(self, plan: Plan) -> None:
        self.host_bounds = torch.tensor([0, plan.token_budget], dtype=torch.int32, device="cpu")
        self._longest = plan.levels[-1].pack_len

    def __call__(self, data_iterator: Any, model: Any) -> Any:
        batch: BareBatch = next(data_iterator)
        update_seqlen_stats_from_cu_seqlens(cu_seqlens=batch.cu_seqlens[: batch.num_documents + 1])
        output = model(
            input_ids=batch.tokens,
            position_ids=batch.positions[None],
            attention_mask=None,
            labels=batch.labels,
            packed_seq_params=HbpPackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=self.host_bounds,
                cu_seqlens_kv=self.host_bounds,
                max_seqlen_q=self._longest,
                max_seqlen_kv=self._longest,
                pack_cu_seqlens=batch.cu_seqlens,
                pack_bounds=batch.bounds,
                pack_max_seqlen=batch.max_seqlen,
                local_positions=batch.positions,
                rotary_rows=self._longest,
            ),
            padding_mask=batch.padding_mask,
        )
        return output, partial(_loss, batch)


def _loss(batch: BareBatch, losses: torch.Tensor) -> Any:
    loss = torch.sum(losses.view(-1).float() * batch.loss_weights)
    checks: Any = ((torch.isnan, "NaN"), (torch.isinf, "Inf"))
    for check, name in checks:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=check,
            message=f"found {name} in the loss",
            tolerance=0.0,
            fatal=True,
        )
    report = torch.stack([loss.detach(), batch.num_trained.to(loss.dtype)])
    return loss, batch.num_trained.clone(), {"lm loss": report}
