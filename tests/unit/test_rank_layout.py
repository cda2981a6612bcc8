"""Groups by arithmetic, and groups that do not fit together."""

import dataclasses
import re

import pytest

from megatron_hbp.check.collectives import ModelTraffic
from megatron_hbp.check.lockstep import lockstep
from megatron_hbp.check.rank_layout import (
    GROUP_KINDS,
    RankLayout,
    cp_groups,
    group_problems,
    groups_by_arithmetic,
)
from tests.unit.lockstep_cases import MOE, plan_for, stages_for


def test_groups_of_sixteen_gpus():
    """Megatron's own example: TP 2, PP 4 on 16 GPUs."""
    layout = RankLayout(world_size=16, tp_size=2, num_stages=4)
    pairs = [[r, r + 2] for first in range(0, 16, 4) for r in (first, first + 1)]
    assert groups_by_arithmetic(layout, "dp").tolist() == pairs
    assert groups_by_arithmetic(layout, "tp").tolist() == [[r, r + 1] for r in range(0, 16, 2)]
    assert groups_by_arithmetic(layout, "pp").tolist() == [
        [r, r + 4, r + 8, r + 12] for r in range(4)
    ]
    assert cp_groups(layout, 2).tolist() == pairs
    with pytest.raises(ValueError, match=r"CP size 4 does not divide the 2 ranks .* use one of"):
        cp_groups(layout, 4)


@pytest.mark.parametrize(
    ("kind", "change", "pattern"),
    [
        ("tp", lambda g: g[:-1], "global rank 14 is in 0 tp groups; it must be in one"),
        ("dp", lambda g: [*g[:-1], g[0]], r"global rank 0 is in 2 dp groups"),
        ("ep", lambda g: [[*g[0], *g[1]], *g[2:]], "ep groups have unequal sizes"),
        ("tp", lambda g: [[r] for r in range(16)], "tp groups have 1 members, the layout says 2"),
        ("pp", lambda g: [[*g[0][:-1], 16], *g[1:]], "pp groups name global rank 16 of 16 GPUs"),
    ],
)
def test_groups_that_do_not_fit_are_named(kind, change, pattern):
    plain = RankLayout(world_size=16, tp_size=2, num_stages=2, ep_size=2)
    groups = {kind: change(groups_by_arithmetic(plain, kind).tolist())}
    layout = dataclasses.replace(plain, groups=groups)
    assert any(re.search(pattern, text) for text in group_problems(layout))
    assert lockstep(plan_for(plain), layout, stages_for(plain), MOE).problems


def test_groups_that_mix_stages_or_packs_are_found():
    plain = RankLayout(world_size=16, tp_size=2, num_stages=2, ep_size=2)
    plan, stages = plan_for(plain), stages_for(plain)
    whole = {kind: groups_by_arithmetic(plain, kind).tolist() for kind in GROUP_KINDS}
    given = dataclasses.replace(plain, groups=whole)
    assert lockstep(plan, given, stages, MOE).digest == lockstep(plan, plain, stages, MOE).digest

    across = [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]
    mixed = dataclasses.replace(plain, groups={"ep": across})
    problems = lockstep(plan, mixed, stages, MOE).problems
    assert "ep group (0, 8) holds ranks of the pipeline stages 0, 1" in problems[0]

    shifted = [[0, 3], [2, 1], *whole["tp"][2:]]
    problems = lockstep(plan, dataclasses.replace(plain, groups={"tp": shifted}), stages).problems
    assert any(re.match(r"tp group \(0, 3\): in step \d+, micro-batch", text) for text in problems)


def test_layouts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="12 GPUs are no multiple of TP x PP = 2 x 4; use a mult"):
        RankLayout(world_size=12, tp_size=2, num_stages=4)
    with pytest.raises(
        ValueError, match=r"--expert-model-parallel-size 3 x .* does not divide the 8"
    ):
        RankLayout(world_size=16, num_stages=2, ep_size=3)
    with pytest.raises(
        ValueError, match=r"--use-tp-pp-dp-mapping with experts over 4 GPUs .* TP 2"
    ):
        RankLayout(world_size=16, num_stages=2, tp_size=2, ep_size=4, stages_last=False)
    with pytest.raises(ValueError, match="tp_size is 0; it must be at least 1"):
        RankLayout(world_size=16, tp_size=0)
    with pytest.raises(ValueError, match="groups of kind 'cp'; there are tp, pp"):
        RankLayout(world_size=16, groups={"cp": [[0, 1]]})
    with pytest.raises(ValueError, match="--moe-token-dispatcher-type deepep: use one of alltoall"):
        ModelTraffic(dispatcher="deepep")
