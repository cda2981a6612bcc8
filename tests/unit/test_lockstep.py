"""Lockstep: no false alarm, no missed difference, against sequences that are written out."""

import re
from collections import Counter

import numpy as np
import pytest

from megatron_hbp.check.lockstep import lockstep
from megatron_hbp.check.rank_layout import RankLayout
from megatron_hbp.check.sequence import rank_sequence
from tests.unit.lockstep_cases import (
    LAYOUTS,
    LEVELS,
    MOE,
    edited,
    lengths,
    plan_for,
    stages_for,
    stuck_ranks,
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_stays_in_lockstep_on_every_layout(name):
    layout = LAYOUTS[name]
    levels = tuple(level for level in LEVELS if level.cp_size <= layout.num_ranks)
    seq_lens = np.minimum(lengths(), levels[-1].pack_len)
    plan = plan_for(layout, levels, seq_lens=seq_lens)
    stages = stages_for(layout, levels)
    result = lockstep(plan, layout, stages, MOE)
    assert result.problems == []
    assert len(result.hashes) == layout.world_size
    assert len(set(result.hashes.tolist())) == layout.world_size
    again = lockstep(plan, layout, stages, MOE)
    assert again.digest == result.digest
    assert re.fullmatch(r"[0-9a-f]{16}", result.digest)
    assert list(result.cp_groups) == [level.cp_size for level in levels if level.cp_size > 1]
    other = lockstep(plan_for(layout, levels, seed=1, seq_lens=seq_lens), layout, stages, MOE)
    assert other.digest != result.digest


@pytest.mark.parametrize("name", ["TP, EP, expert TP", "TP, PP, virtual, EP", "PP"])
def test_counts_are_those_of_the_sequences_written_out(name):
    layout = LAYOUTS[name]
    plan, stages = plan_for(layout), stages_for(layout)
    counts = lockstep(plan, layout, stages, MOE).num_collectives
    by_rank = []
    for rank in range(layout.world_size):
        found = Counter()
        for step in range(plan.num_steps):
            sequence = rank_sequence(plan, layout, stages, MOE, rank=rank, step=step)
            found.update(one.op for one in sequence)
        by_rank.append(found)
    fullest = max(by_rank, key=lambda found: sum(found.values()))
    in_step = {kind: count for kind, count in counts.items() if kind not in ENDINGS}
    if layout.tp_size > 1:
        in_step["tp"] -= plan.num_steps  # at the end of a step
    if layout.num_stages > 1:
        in_step["pp"] -= plan.num_steps
    assert sum(in_step.values()) == sum(fullest.values())
    assert in_step.get("pp", 0) == fullest["send"] + fullest["recv"]


ENDINGS = ("dp", "expert_dp", "mp")


@pytest.mark.parametrize("name", LAYOUTS)
def test_written_sequences_in_lockstep_run_to_their_end(name):
    layout = LAYOUTS[name]
    levels = tuple(level for level in LEVELS if level.cp_size <= layout.num_ranks)
    plan = plan_for(layout, levels, seq_lens=np.minimum(lengths(), levels[-1].pack_len))
    plans = dict.fromkeys(range(layout.world_size), plan)
    last = plan.num_steps - 1
    assert stuck_ranks(plans, layout, stages_for(layout, levels), [0, last]) == set()


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_would_stop_the_run_is_named(seed):
    """One rank takes the micro-batches of one step in another order; all ranks wait for ever."""
    rng = np.random.default_rng(seed)
    layout = RankLayout(world_size=16, tp_size=2, num_stages=2, ep_size=2)
    plan, stages = plan_for(layout), stages_for(layout)
    victim = int(rng.integers(layout.world_size))
    by_step = plan.microbatch_level.reshape(-1, 4)
    step = int(rng.choice(np.flatnonzero(by_step.min(axis=1) < by_step.max(axis=1))))
    slots = slice(step * 4, step * 4 + 4)

    # one micro-batch of the victim's step changes places with one of another level
    order = np.arange(len(plan.microbatch_level))
    order[slots] = step * 4 + np.roll(np.arange(4), 1)
    starts, ends = plan.microbatch_offsets[:-1][order], plan.microbatch_offsets[1:][order]
    packs = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
    other = edited(
        plan,
        microbatch_level=lambda old: old[order],
        microbatch_offsets=lambda old: np.cumsum([0, *(ends - starts)]),
        sequence_ids=lambda old: np.concatenate([plan.pack(p) for p in packs]),
        pack_offsets=lambda old: np.cumsum([0, *(len(plan.pack(p)) for p in packs)]),
    )
    assert other.audit() == []
    result = lockstep(plan, layout, stages, MOE, others={victim: other})
    assert result.problems
    text = "\n".join(result.problems)
    assert f"rank {victim} " in text
    assert f"step {step}, micro-batch " in text

    plans = {r: other if r == victim else plan for r in range(layout.world_size)}
    assert victim in stuck_ranks(plans, layout, stages, [step])


def test_each_group_of_a_rank_with_another_plan_is_named():
    layout = RankLayout(world_size=16, tp_size=2, num_stages=2, ep_size=2)
    plan, stages = plan_for(layout), stages_for(layout)
    result = lockstep(plan, layout, stages, MOE, others={5: plan_for(layout, seed=7)})
    named = {problem.split(" group ")[0] for problem in result.problems}
    assert {"tp", "pp", "CP 2", "CP 4"} <= named
    for problem in result.problems:
        assert re.search(r"group \([\d, .]+\): in step \d+, micro-batch \d+ global rank", problem)
        assert "rank 5 " in problem
        assert problem.endswith("give all ranks the same plan")


def test_equal_plans_held_apart_are_one_plan():
    layout = RankLayout(world_size=8)
    plan, stages = plan_for(layout), stages_for(layout)
    assert lockstep(plan, layout, stages, MOE, others={3: plan_for(layout)}).problems == []


def test_a_pack_with_two_sequences_exchanged_is_found():
    layout = RankLayout(world_size=8, tp_size=2)
    plan, stages = plan_for(layout), stages_for(layout)
    sizes = np.diff(plan.pack_offsets)
    pack = int(np.flatnonzero(sizes > 1)[-1])

    def exchange(ids):
        first = plan.pack_offsets[pack]
        ids[[first, first + 1]] = ids[[first + 1, first]]

    other = edited(plan, sequence_ids=exchange)
    holders = dict.fromkeys(range(1, 8, 2), other)
    result = lockstep(plan, layout, stages, MOE, others=holders)
    microbatch = int(np.searchsorted(plan.microbatch_offsets, pack, side="right")) - 1
    where = f"step {microbatch // 4}, micro-batch {microbatch % 4}"
    assert result.problems
    assert any(problem.startswith("tp group") and where in problem for problem in result.problems)


def test_br_i05_ranks_with_another_number_of_micro_batches():
    layout = RankLayout(world_size=8, num_stages=2)
    plan, stages = plan_for(layout), stages_for(layout)
    result = lockstep(plan, layout, stages, MOE, others={1: plan_for(layout, num_microbatches=2)})
    assert any(
        "trains 4 micro-batches a step, rank 1 2; give all ranks the same plan" in problem
        for problem in result.problems
    )


def test_stages_of_another_layout_are_refused():
    layout = RankLayout(world_size=8, num_stages=2)
    with pytest.raises(ValueError, match=r"1 stages with .* chunks for a layout of 2 stages"):
        lockstep(plan_for(layout), layout, stages_for(layout)[:1], MOE)
