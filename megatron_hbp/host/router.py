"""A router whose auxiliary loss is right when part of a rank's tokens, or all of them, are padding.

Everything else is the host's router. What it repairs, in 0.19 (tests/distributed/test_moe.py):
- under a padding mask the count of local tokens is summed over the tensor-parallel group in place,
  so the host's auxiliary loss is too strong by the group's size;
- a rank with padding only (the end of a pack under CP, a filler) gives 0/0, and its gradient NaN;
- the expert bias takes the mask as [num_tokens] against [num_tokens, num_experts].
"""

import torch
from megatron.core.transformer.moe.moe_utils import (
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter


class PaddedRouter(TopKRouter):
    """The host's top-k router with its statistics under a padding mask put right."""

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """The load-balancing loss over a rank's S tokens, 0 when all of them are padding.

        The host multiplies it by count x group size and sums over the group, of which each rank
        holds a part of the loss: so count x group size must be the group's count on every rank.
        """
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0 or not with_padding_mask:
            return super()._apply_aux_loss(probs, scores_for_aux_loss, routing_map)
        tokens_per_expert, _, num_tokens = get_tokens_per_expert_and_token_count(
            routing_map=routing_map,
            reduce_group=self.tp_cp_group,
            topk=self.topk,
            with_padding_mask=True,
        )
        num_tokens = num_tokens.clamp(min=1)
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=tokens_per_expert,
            total_num_tokens=num_tokens,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
            fused=self.config.moe_router_fusion,
        )
        return self.attach_and_log_load_balancing_loss(
            activation=probs,
            aux_loss_coeff=coefficient,
            aux_loss=loss,
            aux_loss_name="load_balancing_loss",
            reduce_group=self.tp_cp_group,
            valid_token_count=num_tokens / self.tp_cp_group.size(),
        )

    def _apply_expert_bias(
        self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        if padding_mask is not None:
            padding_mask = padding_mask.unsqueeze(-1)
        super()._apply_expert_bias(routing_map, padding_mask=padding_mask)
