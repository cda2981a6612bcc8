"""Context-parallel (CP) process groups, carved out of each DP x CP domain.

Guarantees:
- one group per (CP size > 1, offset) in a domain, of consecutive ranks, made once;
- every rank makes its groups in ascending size, so the order is the same everywhere;
- they wait as long as the host's own groups, not PyTorch's ten minutes.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def cp_offsets(num_ranks: int, cp_size: int) -> list[range]:
    """The ranks (0 .. num_ranks - 1) of each CP group of one size, in order.

    Raises ValueError when cp_size does not divide num_ranks.
    """
    if num_ranks % cp_size:
        raise ValueError(f"CP size {cp_size} does not divide {num_ranks} ranks")
    return [range(start, start + cp_size) for start in range(0, num_ranks, cp_size)]


class CpGroups:
    """This rank's CP group of each size; None for size 1."""

    def __init__(
        self,
        domain: list[int],
        rank: int,
        cp_sizes: Iterable[int],
        timeout: timedelta | None = None,
    ) -> None:
        """domain: global ranks of the DP x CP domain, in order. rank: own place in it. timeout: of
        a collective; None is PyTorch's default, which is not that of the run's first group.
        """
        self._groups: dict[int, dist.ProcessGroup | None] = {1: None}
        for size in sorted(set(cp_sizes) - {1}):
            members = cp_offsets(len(domain), size)[rank // size]
            self._groups[size] = parallel_state.create_group(
                ranks=[domain[place] for place in members],
                timeout=timeout,
                use_local_synchronization=True,
                group_desc=f"HBP_CP_GROUP_{size}",
            )

    def __getitem__(self, cp_size: int) -> dist.ProcessGroup | None:
        return self._groups[cp_size]

    def warm_up(self) -> None:
        """One tiny all-to-all per group: communicators exist before the first step."""
        for size, group in sorted(self._groups.items()):
            if group is not None:
                sent = torch.zeros(size, device=torch.cuda.current_device())
                dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def domain_groups(cp_sizes: Iterable[int], timeout: timedelta | None = None) -> CpGroups:
    """The CP groups of this rank inside its DP x CP domain."""
    domain_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return CpGroups(
        dist.get_process_group_ranks(domain_group), dist.get_rank(domain_group), cp_sizes, timeout
    )


def create_cp_groups(cp_sizes: Iterable[int], timeout: timedelta | None = None) -> CpGroups:
    """The same, warmed up."""
    groups = domain_groups(cp_sizes, timeout)
    groups.warm_up()
    return groups
