"""Groups that cross nodes are counted one by one, and each warning has a way out that holds."""

import dataclasses
import re

import numpy as np
import pytest

from megatron_hbp.check.nodes import group_nodes, node_warnings
from megatron_hbp.check.rank_layout import RankLayout, cp_groups


def spans(groups, gpus_per_node):
    return [len({rank // gpus_per_node for rank in group}) for group in np.asarray(groups).tolist()]


@pytest.mark.parametrize("gpus_per_node", [1, 4, 6, 8, 72])
@pytest.mark.parametrize(("tp_size", "num_stages", "ep_size"), [(1, 1, 1), (2, 3, 8), (4, 2, 12)])
def test_crossing_groups_are_those_with_ranks_on_several_nodes(
    tp_size, num_stages, ep_size, gpus_per_node
):
    layout = RankLayout(
        world_size=tp_size * num_stages * 24,
        tp_size=tp_size,
        num_stages=num_stages,
        ep_size=ep_size,
    )
    found = {groups.kind: groups for groups in group_nodes(layout, gpus_per_node, [1, 2, 8, 24])}
    wanted = {f"CP {size}": cp_groups(layout, size) for size in (2, 8, 24)}
    wanted |= {kind: layout.members(kind) for kind in ("tp", "ep")}
    for kind, members in wanted.items():
        if len(members[0]) == 1:
            assert kind not in found
            continue
        nodes = spans(members, gpus_per_node)
        groups = found[kind]
        assert (groups.num_groups, groups.size) == (len(nodes), len(members[0]))
        assert groups.crossing == sum(n > 1 for n in nodes)
        assert groups.most_nodes == max(nodes)
        first = next((i for i, n in enumerate(nodes) if n > 1), 0)
        assert groups.example == tuple(members[first])
    assert "CP 1" not in found


def test_groups_in_a_node_give_no_warning():
    layout = RankLayout(world_size=256, num_stages=8, ep_size=8)
    assert node_warnings(layout, 8, [1, 8]) == []
    assert node_warnings(RankLayout(world_size=32, tp_size=2), 8, [1, 4]) == []


def test_cp_groups_across_nodes_because_of_tp():
    layout = RankLayout(world_size=64, tp_size=2)
    (warning,) = node_warnings(layout, 8, [1, 8])
    assert warning == (
        "8 of 8 CP groups of size 8 span 2 nodes of 8 GPUs (the first: global ranks 0, 2, 4, 6, 8, "
        "10, 12, 14): their all-to-alls, two a layer and direction, cross the network, for their "
        "members are TP 2 apart; use CP 4 with a longer --seq-length, or "
        "--tensor-model-parallel-size 1"
    )


def test_tp_and_expert_groups_across_nodes():
    warnings = node_warnings(RankLayout(world_size=64, tp_size=16, ep_size=32), 8, [1])
    assert re.match(r"4 of 4 TP groups of size 16 span 2 nodes .*-parallel-size 8$", warnings[0])
    assert re.match(r"2 of 2 EP groups of size 32 span 4 nodes of 8 GPUs", warnings[1])
    assert warnings[1].endswith("use --expert-model-parallel-size 8")
    warnings = node_warnings(
        RankLayout(world_size=64, tp_size=4, ep_size=4, expert_tp_size=4), 8, []
    )
    assert re.match(r"4 of 4 groups of expert TP x EP of size 16 .*-parallel-size 2$", warnings[-1])


def number(pattern, text):
    (found,) = re.findall(pattern, text)
    return int(found)


def crossing(layout, gpus_per_node, kind, cp_size=1):
    found = group_nodes(layout, gpus_per_node, [cp_size])
    return sum(groups.crossing for groups in found if groups.kind == kind)


@pytest.mark.parametrize("gpus_per_node", [4, 6, 8, 16])
@pytest.mark.parametrize(
    "layout",
    [
        RankLayout(world_size=192, tp_size=2, ep_size=16),
        RankLayout(world_size=192, tp_size=16, ep_size=24, num_stages=2),
        RankLayout(world_size=144, tp_size=1, ep_size=16, num_stages=3),
    ],
)
def test_a_way_out_leads_out(layout, gpus_per_node):
    """What a warning proposes is laid out again and crosses no more."""
    size = 8 if layout.num_ranks % 8 == 0 else layout.num_ranks
    for warning in node_warnings(layout, gpus_per_node, [size]):
        if " CP groups " in warning:
            smaller = number(r"use CP (\d+)", warning)
            assert not crossing(layout, gpus_per_node, f"CP {smaller}", smaller)
        elif " TP groups " in warning:
            tp_size = number(r"--tensor-model-parallel-size (\d+)", warning)
            better = dataclasses.replace(layout, tp_size=tp_size)
            assert not any(
                g.crossing for g in group_nodes(better, gpus_per_node, [1]) if g.kind == "tp"
            )
        else:
            ep_size = number(r"--expert-model-parallel-size (\d+)", warning)
            better = dataclasses.replace(layout, ep_size=ep_size)
            assert not any(
                g.crossing for g in group_nodes(better, gpus_per_node, [1]) if g.kind == "ep"
            )


def test_wrong_sizes():
    layout = RankLayout(world_size=8)
    with pytest.raises(ValueError, match="gpus_per_node is 0; it must be at least 1"):
        group_nodes(layout, 0, [1])
    with pytest.raises(ValueError, match="CP size 3 does not divide the 8 ranks"):
        group_nodes(layout, 8, [3])
