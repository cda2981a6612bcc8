"""The CP groups that real ranks end up in."""

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_hbp.host.groups import create_cp_groups


def members() -> dict[int, tuple[list[int], int] | None]:
    """Per CP size, the global ranks of this rank's group and its place in it."""
    dist.init_process_group(backend="gloo")
    parallel_state.initialize_model_parallel()
    groups = create_cp_groups([4, 1, 2])
    found: dict[int, tuple[list[int], int] | None] = {}
    for size in (1, 2, 4):
        group = groups[size]
        found[size] = group and (dist.get_process_group_ranks(group), group.rank())
    return found
