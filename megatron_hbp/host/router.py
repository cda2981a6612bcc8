"""A router that counts tokens rightly when part of a pack is padding.

Both repairs are for 0.19 and named in compat.py; everything else is the host's router.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_hbp.host import compat


class PaddedRouter(TopKRouter):
    """The host's top-k router with its token counts under a padding mask put right."""

    def attach_and_log_load_balancing_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hands on the count that makes the summed loss a token-weighted mean.

        The caller multiplies by count x group size; each rank of the group holds a part of the
        loss, so that product must be the group's count on every rank.
        """
        count = kwargs.get("valid_token_count")
        if compat.LOCAL_COUNT_IS_GROUP_COUNT and isinstance(count, torch.Tensor):
            kwargs["valid_token_count"] = count / self.tp_cp_group.size()
        return super().attach_and_log_load_balancing_loss(*args, **kwargs)

    def _apply_expert_bias(
        self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        if compat.EXPERT_BIAS_MASK_IS_FLAT and padding_mask is not None:
            padding_mask = padding_mask.unsqueeze(-1)
        super()._apply_expert_bias(routing_map, padding_mask=padding_mask)
