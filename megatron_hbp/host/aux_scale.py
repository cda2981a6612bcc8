"""The scale of MoE auxiliary losses under a per-token loss.

The host multiplies an auxiliary loss by the tokens it was computed over and later divides all
gradients by the step's trained tokens. That is right only when every token is trained: at 25 %
trained tokens it is four times too strong. Scaled by trained / routed tokens of the step, the
gradient is that of the token-weighted mean over ranks and micro-batches.
"""

from typing import Any

import torch


class AuxScale:
    """Callable for `config.moe_grad_scale_func`; the share is the step's, equal on every rank."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.trained_share = 1.0

    def __call__(self) -> torch.Tensor:
        scale = torch.full((1,), self.trained_share, device=torch.cuda.current_device())
        if self._config.grad_scale_func is not None:
            scale = self._config.grad_scale_func(scale)
        return scale
