"""Seconds of the data-parallel reduction of a step: gradients reduced, weights gathered.

Guarantees (asserted by tests/unit/test_cost_model.py):
- a slower network never makes it cheaper; one rank alone takes no time for its dense parameters.
A ring sends every byte once a phase. It enters a node by as many links as its group has members
there, because NCCL uses the network port of each. Gradients go in fp32, gathered weights in bf16.
"""

from megatron_hbp.hardware import Device
from megatron_hbp.memory_model import GRADIENT_BYTES, WEIGHT_BYTES, stage_parameters
from megatron_hbp.model_shape import ModelShape
from megatron_hbp.run_layout import RunLayout, members_on_node, stages_of

# What the last backward hides (--overlap-grad-reduce and --overlap-param-gather); an assumption.
REDUCTION_OVERLAP = 0.5


def reduction_seconds(model: ModelShape, device: Device, layout: RunLayout) -> float:
    """Of the slowest stage, without what is hidden. Routed experts have a group of their own."""
    split = layout.ep_size * layout.expert_tp_size
    expert_group = layout.num_ranks * layout.tp_size // split
    worst = 0.0
    for stage in stages_of(model, layout):
        dense, experts = stage_parameters(model, layout, stage)
        seconds = _ring(dense, layout, device, size=layout.num_ranks, stride=layout.tp_size)
        seconds += _ring(experts, layout, device, size=expert_group, stride=split)
        worst = max(worst, seconds)
    return (1.0 - REDUCTION_OVERLAP) * worst


def _ring(parameters: float, layout: RunLayout, device: Device, *, size: int, stride: int) -> float:
    """Seconds for `parameters` over a group of `size` GPUs, `stride` apart."""
    if layout.distributed_optimizer:
        sent = parameters * (GRADIENT_BYTES + WEIGHT_BYTES)
    else:
        sent = parameters * 2 * GRADIENT_BYTES  # an all-reduce
    near = members_on_node(size, stride, device.devices_per_node)
    link = device.intra_node_bandwidth if near > 1 else float("inf")
    if near < size:
        link = min(link, near * device.inter_node_bandwidth)
    return sent * (size - 1) / size / link
