"""The CP groups that real ranks end up in."""

import sys
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_hbp.host import pretrain_gpt
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


def timeouts(argv: list[str]) -> dict[str, float]:
    """Minutes that a collective of each group of a training run may take."""
    found: dict[str, float] = {}
    new_group = dist.new_group

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("timeout") is not None:
            found[kwargs["group_desc"]] = kwargs["timeout"].total_seconds() / 60
        return new_group(*args, **kwargs)

    dist.new_group = recorded
    sys.argv = ["pretrain_gpt", *argv]
    pretrain_gpt.main()
    return found
