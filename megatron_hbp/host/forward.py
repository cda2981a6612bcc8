"""`forward_step` for every pipeline stage: a micro-batch becomes a pack, the pack a loss."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import get_args, get_timers
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_hbp.host.aux_scale import AuxScale
from megatron_hbp.host.groups import CpGroups
from megatron_hbp.host.packed import HbpPackedSeqParams, check_cu_seqlens
from megatron_hbp.host.recompute import LevelRecompute
from megatron_hbp.host.step_log import StepLog
from megatron_hbp.plan import Plan

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


class ForwardStep:
    """What Megatron calls for every micro-batch of every model chunk on this rank."""

    def __init__(
        self, plan: Plan, groups: CpGroups, aux_scale: AuxScale | None, step_log: StepLog
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._aux_scale = aux_scale
        self._log = step_log
        self._recompute: LevelRecompute | None = None
        self._host_bounds: torch.Tensor | None = None

    def __call__(self, data_iterator: Any, model: Any) -> tuple[torch.Tensor, LossFunction]:
        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        item = next(data_iterator)
        batch = {
            name: value.cuda(non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in item.items()
            if name != "cu_seqlens"
        }
        pack = self._pack(item, batch)
        batch["cp_size"] = pack.pack_cp_size
        timers("batch-generator").stop()

        first_chunk = get_attr_wrapped_model(model, "vp_stage") in (None, 0)
        if item["training"]:
            if first_chunk:
                self._log.start_microbatch(item)
                self._count_flops(item, pack)
            if self._aux_scale is not None:
                self._aux_scale.trained_share = item["trained_share"]
        self._apply_recompute(model, item["level"])
        output = model(
            input_ids=batch.get("tokens"),
            position_ids=batch["positions"][None],
            attention_mask=None,
            labels=batch.get("labels"),
            packed_seq_params=pack,
            **self._padding(model, batch["padding_mask"]),
        )
        return output, partial(self._loss, item, batch)

    def _pack(self, item: dict[str, Any], batch: dict[str, Any]) -> HbpPackedSeqParams:
        plan = self._plan
        longest = plan.levels[-1].pack_len
        if self._host_bounds is None:
            # the host's view: one document of S tokens. On the CPU unless a fused kernel reads it,
            # so that the host's `.tolist()` costs no synchronisation
            fused = get_args().apply_rope_fusion
            self._host_bounds = torch.tensor(
                [0, plan.token_budget],
                dtype=torch.int32,
                device=torch.cuda.current_device() if fused else "cpu",
            )
        level = plan.levels[item["level"]]
        bounds = check_cu_seqlens(item["cu_seqlens"], level.pack_len, item["max_seqlen"])
        return HbpPackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self._host_bounds,
            cu_seqlens_kv=self._host_bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            pack_cu_seqlens=item["cu_seqlens"].cuda(non_blocking=True),
            pack_bounds=bounds,
            pack_max_seqlen=item["max_seqlen"],
            pack_cp_group=self._groups[level.cp_size],
            local_positions=batch["positions"],
            rotary_rows=longest,
        )

    def _apply_recompute(self, model: Any, level: int) -> None:
        config = get_model_config(model)
        if self._recompute is None:
            num_chunks = config.pipeline_model_parallel_size * (
                config.virtual_pipeline_model_parallel_size or 1
            )
            self._recompute = LevelRecompute(config, self._plan.levels, num_chunks)
        self._recompute.apply(config, level)

    def _padding(self, model: Any, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """The router's padding mask [1, S], True for padding; none for dense models.

        The host scatters it over tensor-parallel ranks on the first stage only: later stages get
        it scattered.
        """
        config = get_model_config(model)
        if config.num_moe_experts is None:
            return {}
        if config.sequence_parallel and not get_attr_wrapped_model(model, "pre_process"):
            tp_rank = parallel_state.get_tensor_model_parallel_rank()
            mask = mask.chunk(config.tensor_model_parallel_size, dim=1)[tp_rank]
        return {"padding_mask": mask}

    def _count_flops(self, item: dict[str, Any], pack: HbpPackedSeqParams) -> None:
        """FLOPs by document: CP rank 0 counts the pack, the others issue the same collective."""
        bounds = pack.pack_cu_seqlens
        assert bounds is not None
        last = item["num_documents"] + 1 if item["cp_rank"] == 0 else 1
        counted = bounds[:last]
        if counted.numel() < 2:
            counted = bounds.new_zeros(2)
        update_seqlen_stats_from_cu_seqlens(cu_seqlens=counted)

    def _loss(
        self, item: dict[str, Any], batch: dict[str, Any], losses: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Weighted sum of token losses, trained tokens of this rank, and the host's report."""
        loss = torch.sum(losses.view(-1).float() * batch["loss_weights"])
        num_trained = batch["num_trained"]
        args = get_args()
        if args.check_for_nan_in_loss_and_grad:
            for check, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
                get_rerun_state_machine().validate_result(
                    result=loss,
                    rejection_func=check,
                    message=f"found {name} in local forward loss calculation",
                    tolerance=0.0,
                    fatal=True,
                )
        report = torch.stack([loss.detach(), num_trained.to(loss.dtype)])
        if item["training"]:
            self._log.end_microbatch(item, batch["cp_size"], loss, report)
        return loss, num_trained.clone(), {"lm loss": report}
