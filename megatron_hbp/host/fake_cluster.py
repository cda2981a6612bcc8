"""All process groups of a large cluster in one process: torch's fake backend, no communication.

Guarantees (asserted by tests/host/test_preflight.py):
- the groups are made by the host's own initialize_model_parallel, at the real size;
- the groups of all ranks, by the host's RankGenerator, hold for each rank looked at exactly the
  ranks of its real group.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def as_rank(args: Any, rank: int) -> Iterator[None]:
    """Inside, this process is `rank` of args.world_size, with the host's groups."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            order=_order(args),
            create_gloo_process_groups=False,  # gloo would connect to the other ranks
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def all_groups(args: Any) -> dict[str, list[list[int]]]:
    """Global ranks of every group of each kind: those of check.rank_layout.GROUP_KINDS."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    ep, expert_tp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or tp
    order = _order(args)
    dense = parallel_state.RankGenerator(
        tp=tp, ep=1, dp=args.world_size // (tp * pp), pp=pp, cp=1, order=order
    )
    experts = parallel_state.RankGenerator(
        tp=expert_tp,
        ep=ep,
        dp=args.world_size // (expert_tp * ep * pp),
        pp=pp,
        cp=1,
        order=order,
    )
    return {
        "tp": dense.get_ranks("tp"),
        "pp": dense.get_ranks("pp"),
        "dp": dense.get_ranks("dp-cp"),
        "ep": experts.get_ranks("ep"),
        "expert_tp": experts.get_ranks("tp"),
        "expert_dp": experts.get_ranks("dp"),
        "mp": dense.get_ranks("tp-pp"),
        "tp_dp": dense.get_ranks("tp-dp-cp"),
        "tp_ep": experts.get_ranks("tp-ep"),
    }


def own_groups() -> dict[str, list[int]]:
    """Global ranks of this rank's real groups, by the kinds of all_groups()."""
    made = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "expert_tp": parallel_state.get_expert_tensor_parallel_group(),
        "expert_dp": parallel_state.get_expert_data_parallel_group(),
        "mp": parallel_state.get_model_parallel_group(),
        "tp_dp": parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "tp_ep": parallel_state.get_expert_tensor_and_model_parallel_group(),
    }
    return {kind: dist.get_process_group_ranks(group) for kind, group in made.items()}


def _order(args: Any) -> str:
    """As megatron.training.initialize chooses it."""
    return "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
