"""Plans that would part the ranks of a run are described, with step, micro-batch and a way out."""

import re

import pytest

from megatron_hbp.check.lockstep import lockstep
from megatron_hbp.check.rank_layout import RankLayout
from tests.unit.lockstep_cases import MOE, edited, plan_for, stages_for

GOOD = RankLayout(world_size=8)
BROKEN = {
    "too few packs": (
        GOOD,
        {"microbatch_offsets": lambda a: a.__setitem__(slice(6, None), a[6:] - 1)},
        r"step 1, micro-batch 1 of level \S+: \d packs, 8 ranks need \d: ranks \d to 7 would train "
        r"packs of the next one; plan again",
    ),
    "too many packs": (
        GOOD,
        {"microbatch_offsets": lambda a: a.__setitem__(slice(6, None), a[6:] + 1)},
        r"step 1, micro-batch 1 of level \S+: \d+ packs, 8 ranks need \d: 1 would be trained by "
        r"nobody; plan again",
    ),
    "another level": (
        GOOD,
        {"microbatch_level": lambda a: a.__setitem__(5, (a[5] + 1) % 3)},
        r"step 1, micro-batch 1 of level \S+: \d packs, 8 ranks need \d",
    ),
    "no such level": (
        GOOD,
        {"microbatch_level": lambda a: a.__setitem__(5, 3)},
        r"step 1, micro-batch 1: level 3 of 3; plan again",
    ),
    "a step is short": (
        GOOD,
        {"microbatch_level": lambda a: a[:-1], "microbatch_offsets": lambda a: a[:-1]},
        r"the plan has \d+ micro-batches with \d+ lists of packs for \d+ steps of 4; steps would "
        r"be unequal; plan again",
    ),
    "packs are cut off": (
        GOOD,
        {"pack_offsets": lambda a: a[:-1]},
        r"the plan's micro-batches name \d+ packs with \d+ sequences, it holds \d+ with \d+",
    ),
    "a pack ends before it starts": (
        GOOD,
        {"pack_offsets": lambda a: a.__setitem__(7, a[9])},
        r"pack \d+ ends before it starts; plan again",
    ),
    "no such sequence": (
        GOOD,
        {"sequence_ids": lambda a: a.__setitem__(7, 300)},
        r"the plan names sequence 300 of 300; plan again",
    ),
    "a pack too long for its level": (
        GOOD,
        {"seq_lens": lambda a: a.__setitem__(7, 257)},
        r"step \d+, micro-batch \d: pack \d+ has \d+ tokens, its level \S+ takes \d+; plan again",
    ),
    "other ranks": (
        RankLayout(world_size=16),
        {},
        r"the plan is for 8 ranks, the run has 16 \(GPUs / \(TP x PP\)\); plan again with --ranks",
    ),
    "CP does not divide the ranks": (
        RankLayout(world_size=6),
        {},
        r"level 256:4:full: CP size 4 does not divide 6 ranks; choose one of \[1, 2, 3, 6\]",
    ),
    "virtual stages": (
        RankLayout(world_size=24, num_stages=3, num_virtual_stages=2),
        {},
        r"4 micro-batches a step are no multiple of 3 pipeline stages, which virtual stages need; "
        r"use 6",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_plan_that_parts_the_ranks_is_described(name):
    layout, arrays, pattern = BROKEN[name]
    plan = edited(plan_for(GOOD), **arrays)
    result = lockstep(plan, layout, stages_for(layout), MOE)
    assert any(re.search(pattern, problem) for problem in result.problems), result.problems
    assert result.digest == ""
    assert all("\n" not in problem for problem in result.problems)
