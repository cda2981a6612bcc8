"""Jobs that look into MoE routers: what they were given, what they counted, their gradients."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training import training as host_training

from tests.distributed import jobs_watched


def _modules(model: Any, kind: type) -> list[Any]:
    return [module for chunk in model for module in chunk.modules() if isinstance(module, kind)]


class RouterWatch:
    """Per step and router: gradient and weight; per forward: input, mask, counts and losses."""

    def __init__(self, expert_zero_only: bool) -> None:
        self.gradients: list[dict[int, torch.Tensor]] = []
        self.expert_gradients: dict[str, torch.Tensor | None] = {}
        self.weights: dict[int, torch.Tensor] = {}
        self.inputs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.counts: list[tuple[int, list[int]]] = []
        self.metrics: list[tuple[str, int, float]] = []
        self.bias_counts: dict[int, list[float]] = {}
        self._watch_steps()
        self._watch_routers(expert_zero_only)
        self._watch_metrics()

    def _watch_steps(self) -> None:
        original = host_training.train_step

        def train_step(forward: Any, iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            routers = _modules(model, TopKRouter)
            if not self.weights:
                self.weights = {r.layer_number: r.weight.detach().clone() for r in routers}
            result = original(forward, iterator, model, *args, **kwargs)
            self.gradients.append({r.layer_number: r.weight.main_grad.clone() for r in routers})
            for place, experts in enumerate(_modules(model, SequentialMLP)):
                for name, parameter in experts.named_parameters():
                    grad = parameter.main_grad
                    self.expert_gradients[f"{place}.{name}"] = (
                        None if grad is None else grad.clone()
                    )
            return result

        host_training.train_step = train_step

    def _watch_routers(self, expert_zero_only: bool) -> None:
        forward, gating = TopKRouter.forward, TopKRouter.gating
        count_bias = TopKRouter._apply_expert_bias

        def watched_forward(router: Any, input: torch.Tensor, padding_mask: Any = None) -> Any:
            mask = (
                torch.zeros(input.shape[:2], dtype=bool) if padding_mask is None else padding_mask
            )
            self.inputs.append((router.layer_number, input.detach().clone(), mask.clone()))
            probs, routing_map = forward(router, input, padding_mask)
            real = routing_map[~mask.reshape(-1)]
            self.counts.append((router.layer_number, real.sum(dim=0).tolist()))
            return probs, routing_map

        def skewed_gating(router: Any, input: torch.Tensor) -> torch.Tensor:
            logits = gating(router, input)
            shift = torch.zeros_like(logits)
            shift[..., 0] = 50.0
            return logits + shift

        def watched_bias(router: Any, *args: Any, **kwargs: Any) -> None:
            count_bias(router, *args, **kwargs)
            if router.enable_expert_bias:
                self.bias_counts[router.layer_number] = router.local_tokens_per_expert.tolist()

        TopKRouter.forward = watched_forward
        TopKRouter._apply_expert_bias = watched_bias
        if expert_zero_only:
            TopKRouter.gating = skewed_gating

    def _watch_metrics(self) -> None:
        tracker = moe_logging.MoEMetricsTracker
        original = tracker.record

        def record(
            own: Any, name: str, value: Any, layer_number: int, *args: Any, **kw: Any
        ) -> None:
            self.metrics.append((name, layer_number, float(value)))
            original(own, name, value, layer_number, *args, **kw)

        tracker.record = record


def train(
    argv: list[str], loss_scale: float = 0.0, expert_zero_only: bool = False
) -> dict[str, Any]:
    """jobs_watched.train with the main loss off, and what the routers saw."""
    watch = RouterWatch(expert_zero_only)
    result = jobs_watched.train(argv, loss_scale=loss_scale)
    return result | {
        "router_gradients": watch.gradients,
        "expert_gradients": watch.expert_gradients,
        "router_weights": watch.weights,
        "router_inputs": watch.inputs,
        "expert_counts": watch.counts,
        "metrics": watch.metrics,
        "bias_counts": watch.bias_counts,
    }


def local_token_counts() -> dict[str, Any]:
    """What 0.19's helper answers on two ranks with 3 and 5 real tokens of 6, two experts each."""
    dist.init_process_group("gloo")
    real = (3, 5)[dist.get_rank()]
    routing_map = torch.zeros(6, 4, dtype=torch.int64)
    routing_map[:real, :2] = 1
    _, local, total = get_tokens_per_expert_and_token_count(
        routing_map=routing_map, reduce_group=dist.group.WORLD, topk=2, with_padding_mask=True
    )
    return {"local": float(local), "total": float(total)}
