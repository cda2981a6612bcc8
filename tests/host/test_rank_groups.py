"""Groups by arithmetic are those of the host's RankGenerator; CP groups are those of a run."""

import pytest

from megatron_hbp.check.rank_layout import RankLayout, cp_groups, groups_by_arithmetic

parallel_state = pytest.importorskip(
    "megatron.core.parallel_state", reason="needs the extra [train]"
)
groups = pytest.importorskip("megatron_hbp.host.groups", reason="needs the extra [train]")

LAYOUTS = [
    RankLayout(world_size=1),
    RankLayout(world_size=8, ep_size=4),
    RankLayout(world_size=32, tp_size=2, num_stages=4, ep_size=2),
    RankLayout(world_size=48, tp_size=4, num_stages=3, ep_size=8, expert_tp_size=2),
    RankLayout(world_size=48, tp_size=2, num_stages=3, ep_size=8, expert_tp_size=1),
    RankLayout(world_size=256, num_stages=8, ep_size=8),
    RankLayout(world_size=2048, num_stages=16, ep_size=8, expert_tp_size=2, tp_size=2),
    RankLayout(world_size=32, tp_size=2, num_stages=4, expert_tp_size=2, stages_last=False),
    RankLayout(world_size=32, tp_size=2, num_stages=4, ep_size=2, stages_last=False),
]

# our names of groups by the host's tokens: in the generator of dense layers, in that of experts
DENSE = {"tp": "tp", "pp": "pp", "dp": "dp-cp", "mp": "tp-pp", "tp_dp": "tp-dp-cp"}
EXPERT = {"expert_tp": "tp", "ep": "ep", "expert_dp": "dp", "tp_ep": "tp-ep"}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_are_the_hosts(layout):
    """Set up as initialize_model_parallel() does, without CP."""
    order = "tp-cp-ep-dp-pp" if layout.stages_last else "tp-cp-ep-pp-dp"
    experts = layout.ep_size * layout.expert_tp_size * layout.num_stages
    dense = parallel_state.RankGenerator(
        tp=layout.tp_size, ep=1, dp=layout.num_ranks, pp=layout.num_stages, cp=1, order=order
    )
    expert = parallel_state.RankGenerator(
        tp=layout.expert_tp_size,
        ep=layout.ep_size,
        dp=layout.world_size // experts,
        pp=layout.num_stages,
        cp=1,
        order=order,
    )
    for generator, kinds in ((dense, DENSE), (expert, EXPERT)):
        for kind, token in kinds.items():
            theirs = sorted(generator.get_ranks(token))
            assert groups_by_arithmetic(layout, kind).tolist() == theirs, kind


def test_cp_groups_are_those_that_a_run_makes():
    layout = RankLayout(world_size=48, tp_size=2, num_stages=3)
    for size in (1, 2, 4, 8):
        wanted = [
            [domain[place] for place in offsets]
            for domain in layout.members("dp")
            for offsets in groups.cp_offsets(layout.num_ranks, size)
        ]
        assert cp_groups(layout, size).tolist() == wanted
