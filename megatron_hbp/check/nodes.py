"""Which process groups cross nodes: CP, TP and expert groups against the GPUs of a node.

Guarantees (asserted by tests/unit/test_check_nodes.py):
- a group is counted as crossing exactly when its global ranks lie on more than one node;
- a warning says which groups, how many nodes they span, and what to change so that they do not.
Global rank r is taken to be on node r // gpus_per_node, as torchrun and srun number processes when
every node runs one per GPU. In Megatron's order neighbours of a CP group are TP ranks apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_hbp.check.rank_layout import RankLayout, cp_groups


@dataclass(frozen=True)
class GroupNodes:
    """Groups of one kind: "tp", "ep", "tp_ep" or "CP n". crossing: those on more than one node.

    most_nodes: that one of them spans. example: global ranks of the first crossing group, or of the
    first group where none does.
    """

    kind: str
    size: int
    num_groups: int
    crossing: int
    most_nodes: int
    example: tuple[int, ...]


def group_nodes(
    layout: RankLayout, gpus_per_node: int, cp_sizes: Iterable[int]
) -> list[GroupNodes]:
    """TP, expert and CP groups that have more than one member, in this order.

    cp_sizes: of the levels. Raises ValueError for CP sizes that do not divide the ranks, and for
    gpus_per_node below 1.
    """
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node is {gpus_per_node}; it must be at least 1")
    found = [
        _on_nodes(kind, np.asarray(layout.members(kind)), gpus_per_node)
        for kind in ("tp", "ep", "tp_ep")
        if kind != "tp_ep" or layout.expert_tp_size > 1
    ]
    for size in sorted(set(cp_sizes)):
        found.append(_on_nodes(f"CP {size}", cp_groups(layout, size), gpus_per_node))
    return [groups for groups in found if groups.size > 1]


def node_warnings(layout: RankLayout, gpus_per_node: int, cp_sizes: Iterable[int]) -> list[str]:
    """A sentence for each kind of groups that cross nodes, with a way out."""
    return [
        f"{groups.crossing} of {groups.num_groups} {_words(groups)} span "
        f"{groups.most_nodes} nodes of {gpus_per_node} GPUs (the first: global ranks "
        f"{_named(groups.example)}): {_cost_and_way_out(groups, layout, gpus_per_node)}"
        for groups in group_nodes(layout, gpus_per_node, cp_sizes)
        if groups.crossing
    ]


def _on_nodes(kind: str, members: np.ndarray, gpus_per_node: int) -> GroupNodes:
    nodes = np.sort(members // gpus_per_node, axis=1)
    spanned = 1 + (np.diff(nodes, axis=1) != 0).sum(axis=1)
    first = int(np.argmax(spanned > 1))
    return GroupNodes(
        kind=kind,
        size=members.shape[1],
        num_groups=len(members),
        crossing=int((spanned > 1).sum()),
        most_nodes=int(spanned.max()),
        example=tuple(members[first].tolist()),
    )


def _words(groups: GroupNodes) -> str:
    if groups.kind.startswith("CP"):
        return f"CP groups of size {groups.size}"
    names = {"tp": "TP groups", "ep": "EP groups", "tp_ep": "groups of expert TP x EP"}
    return f"{names[groups.kind]} of size {groups.size}"


def _cost_and_way_out(groups: GroupNodes, layout: RankLayout, gpus_per_node: int) -> str:
    tp_size = layout.tp_size
    if groups.kind == "tp":
        fitting = _largest(gpus_per_node, tp_size, 1)
        return (
            "every layer would wait for the network four times; use "
            f"--tensor-model-parallel-size {fitting}"
        )
    if groups.kind in ("ep", "tp_ep"):
        fitting = _largest(gpus_per_node, layout.ep_size, layout.expert_tp_size)
        return (
            "tokens go to their experts over the network; if the fabric is not made for it use "
            f"--expert-model-parallel-size {fitting}"
        )
    stride = "" if tp_size == 1 else f", for their members are TP {tp_size} apart"
    fitting = _largest(gpus_per_node, groups.size, tp_size)
    way = f"use CP {fitting} with a longer --seq-length"
    if tp_size > 1:
        way += f", or --tensor-model-parallel-size {max(1, gpus_per_node // groups.size)}"
    return f"their all-to-alls, two a layer and direction, cross the network{stride}; {way}"


def _largest(gpus_per_node: int, size: int, stride: int) -> int:
    """The largest divisor of `size` whose group, ranks `stride` apart, stays in a node."""
    fits = [n for n in range(1, size + 1) if size % n == 0 and gpus_per_node % (n * stride) == 0]
    return max(fits, default=1)


def _named(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ..."
