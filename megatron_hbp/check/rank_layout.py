"""Who is where: the process groups of a run as lists of global ranks.

Guarantees (asserted by tests/unit/test_rank_layout.py and tests/host/test_rank_groups.py):
- the groups worked out here are those of the host's RankGenerator, members in the same order;
- groups that leave out a rank, hold one twice or do not fit together are named, never used.
Megatron numbers GPUs so that tensor parallelism (TP) changes fastest, then the place in the
DP x CP domain, then the pipeline stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Groups = Sequence[Sequence[int]]

# Kinds of groups; "dp" is the whole DP x CP domain of a TP rank and stage, "tp_ep" the ranks that
# exchange tokens among experts, "mp" one whole replica of the model, "tp_dp" all ranks of a stage.
GROUP_KINDS = ("tp", "pp", "dp", "ep", "expert_tp", "expert_dp", "tp_ep", "mp", "tp_dp")


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The ranks of a run. Raises ValueError for sizes that do not divide the world.

    expert_tp_size: --expert-tensor-parallel-size, which is TP where the flag is left out.
    stages_last: false under --use-tp-pp-dp-mapping, where stages change before ranks do.
    overlap_transfers: false under --no-overlap-p2p-communication; only virtual stages can.
    groups: of each of GROUP_KINDS lists of global ranks, as the host made them; kinds that are
    left out are worked out by arithmetic.
    """

    world_size: int
    tp_size: int = 1
    num_stages: int = 1
    num_virtual_stages: int = 1
    ep_size: int = 1
    expert_tp_size: int = 1
    sequence_parallel: bool = True
    stages_last: bool = True
    overlap_transfers: bool = True
    groups: Mapping[str, Groups] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = ("world_size", "tp_size", "num_stages", "num_virtual_stages", "ep_size")
        for name in (*sizes, "expert_tp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.world_size % (self.tp_size * self.num_stages):
            raise ValueError(
                f"{self.world_size} GPUs are no multiple of TP x PP = {self.tp_size} x "
                f"{self.num_stages}; use a multiple of {self.tp_size * self.num_stages}"
            )
        experts = self.ep_size * self.expert_tp_size
        if self.world_size // self.num_stages % experts:
            raise ValueError(
                f"--expert-model-parallel-size {self.ep_size} x --expert-tensor-parallel-size "
                f"{self.expert_tp_size} does not divide the {self.world_size // self.num_stages} "
                "GPUs of a pipeline stage; use sizes that do"
            )
        if not self.stages_last and self.num_stages > 1 and experts != self.tp_size:
            raise ValueError(
                f"--use-tp-pp-dp-mapping with experts over {experts} GPUs (EP x expert TP) and TP "
                f"{self.tp_size}: the two must be equal; leave the flag out"
            )
        unknown = sorted(set(self.groups) - set(GROUP_KINDS))
        if unknown:
            raise ValueError(f"groups of kind {unknown[0]!r}; there are {', '.join(GROUP_KINDS)}")

    @property
    def overlaps(self) -> bool:
        """Whether stages go on while they send and receive."""
        return self.overlap_transfers and self.num_virtual_stages > 1

    @property
    def num_ranks(self) -> int:
        """Places in the DP x CP domain: whole TP x PP replicas."""
        return self.world_size // (self.tp_size * self.num_stages)

    def members(self, kind: str) -> np.ndarray | list[tuple[int, ...]]:
        """The groups of a kind: int64 [groups, members], or lists where their sizes differ."""
        if kind not in self.groups:
            return groups_by_arithmetic(self, kind)
        given = self.groups[kind]
        if len({len(group) for group in given}) == 1:
            return np.array(given, dtype=np.int64)
        return [tuple(group) for group in given]


@dataclass(frozen=True)
class Places:
    """Of each global rank, int64 [world]: its TP rank, place in the DP x CP domain and stage."""

    tp_rank: np.ndarray
    domain_place: np.ndarray
    stage: np.ndarray


def groups_by_arithmetic(layout: RankLayout, kind: str) -> np.ndarray:
    """int64 [groups, members]: global ranks, in the order that Megatron gives them."""
    per_stage = layout.world_size // layout.num_stages
    experts = layout.ep_size * layout.expert_tp_size
    dense = (layout.num_ranks, layout.tp_size)
    expert = (per_stage // experts, layout.ep_size, layout.expert_tp_size)
    ranks = np.arange(layout.world_size, dtype=np.int64)
    if layout.stages_last:
        dense_grid = ranks.reshape(layout.num_stages, *dense)
        expert_grid = ranks.reshape(layout.num_stages, *expert)
    else:
        dense_grid = ranks.reshape(dense[0], layout.num_stages, dense[1]).swapaxes(0, 1)
        expert_grid = ranks.reshape(expert[0], layout.num_stages, *expert[1:]).swapaxes(0, 1)
    across = {
        "tp": (dense_grid, (2,)),
        "dp": (dense_grid, (1,)),
        "pp": (dense_grid, (0,)),
        "mp": (dense_grid, (0, 2)),
        "tp_dp": (dense_grid, (1, 2)),
        "expert_tp": (expert_grid, (3,)),
        "ep": (expert_grid, (2,)),
        "tp_ep": (expert_grid, (2, 3)),
        "expert_dp": (expert_grid, (1,)),
    }
    grid, axes = across[kind]
    size = int(np.prod([grid.shape[axis] for axis in axes]))
    found = np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(-1, size)
    found = np.sort(found, axis=1)
    return found[np.argsort(found[:, 0], kind="stable")]


def group_problems(layout: RankLayout) -> list[str]:
    """What is wrong with the given groups, in words; none when they fit together."""
    problems = []
    sizes = {
        "tp": layout.tp_size,
        "pp": layout.num_stages,
        "dp": layout.num_ranks,
        "ep": layout.ep_size,
        "expert_tp": layout.expert_tp_size,
    }
    for kind in layout.groups:
        members = layout.members(kind)
        count = np.bincount(
            np.concatenate([np.ravel(group) for group in members]), minlength=layout.world_size
        )
        wrong = np.flatnonzero(count[: layout.world_size] != 1)
        if len(count) > layout.world_size:
            problems.append(
                f"{kind} groups name global rank {len(count) - 1} of {layout.world_size} GPUs"
            )
        elif len(wrong):
            problems.append(
                f"global rank {wrong[0]} is in {count[wrong[0]]} {kind} groups; it must be in one"
            )
        elif not isinstance(members, np.ndarray):
            problems.append(f"{kind} groups have unequal sizes")
        elif members.shape[1] != sizes.get(kind, members.shape[1]):
            problems.append(
                f"{kind} groups have {members.shape[1]} members, the layout says {sizes[kind]}"
            )
    return problems


def places(layout: RankLayout) -> Places:
    """Where each global rank is, as its groups say. They must be without group_problems()."""
    return Places(
        *(_index_in_group(layout, kind) for kind in ("tp", "dp", "pp")),
    )


def group_of(layout: RankLayout, kind: str) -> np.ndarray:
    """int64 [world]: the number of each global rank's group of a kind."""
    members = np.asarray(layout.members(kind))
    found = np.empty(layout.world_size, dtype=np.int64)
    found[members] = np.arange(len(members))[:, None]
    return found


def cp_groups(layout: RankLayout, cp_size: int) -> np.ndarray:
    """int64 [groups, cp_size]: the CP groups of one size, neighbours in each DP x CP domain.

    Raises ValueError when cp_size does not divide the ranks.
    """
    ranks = layout.num_ranks
    if ranks % cp_size:
        raise ValueError(
            f"CP size {cp_size} does not divide the {ranks} ranks (GPUs / (TP x PP)); use one of "
            f"{[size for size in range(1, ranks + 1) if ranks % size == 0]}"
        )
    return np.asarray(layout.members("dp")).reshape(-1, cp_size)


def _index_in_group(layout: RankLayout, kind: str) -> np.ndarray:
    members = np.asarray(layout.members(kind))
    found = np.empty(layout.world_size, dtype=np.int64)
    found[members] = np.arange(members.shape[1])[None, :]
    return found
