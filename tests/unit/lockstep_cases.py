"""Layouts, plans and stages for tests of the lockstep proof, and a slow proof beside it."""

import dataclasses
from collections import Counter, deque
from itertools import takewhile

import numpy as np

from megatron_hbp import Level, build_plan
from megatron_hbp.check.collectives import ModelTraffic, stage_work
from megatron_hbp.check.rank_layout import RankLayout
from megatron_hbp.check.sequence import rank_sequence

LEVELS = (Level(64, 1, 3), Level(128, 2, "full"), Level(256, 4, "full"))
MOE = ModelTraffic(latent_attention=True, q_lora=True, shared_experts=True, aux_loss=True)


def lengths(num=300, seed=0):
    """Mostly short, some for every level."""
    drawn = np.random.default_rng(seed).lognormal(3, 1, num)
    return np.clip(drawn, 2, 250).astype(np.int32)


def plan_for(layout, levels=LEVELS, num_microbatches=4, seed=0, seq_lens=None):
    return build_plan(
        lengths() if seq_lens is None else seq_lens,
        list(levels),
        num_ranks=layout.num_ranks,
        num_microbatches=num_microbatches,
        num_stages=layout.num_stages,
        num_virtual_stages=layout.num_virtual_stages,
        mixing="microbatch",
        seed=seed,
    )


def stages_for(layout, levels=LEVELS, moe=True):
    """Three layers a chunk, the model's first one dense."""
    chunks = range(layout.num_virtual_stages)
    return [
        stage_work(
            levels,
            num_chunks=layout.num_stages * layout.num_virtual_stages,
            dense_layers=[3 if not moe else int((stage, chunk) == (0, 0)) for chunk in chunks],
            moe_layers=[0 if not moe else 3 - ((stage, chunk) == (0, 0)) for chunk in chunks],
        )
        for stage in range(layout.num_stages)
    ]


def edited(plan, **arrays):
    """A plan with some arrays changed by functions of copies of them."""
    changed = {}
    for name, change in arrays.items():
        array = np.array(getattr(plan, name))
        answer = change(array)
        changed[name] = array if answer is None else answer
    return dataclasses.replace(plan, **changed)


LAYOUTS = {
    "one process": RankLayout(world_size=1),
    "ranks only": RankLayout(world_size=8),
    "EP": RankLayout(world_size=8, ep_size=4),
    "TP, EP": RankLayout(world_size=16, tp_size=2, ep_size=4),
    "TP, EP, expert TP": RankLayout(world_size=16, tp_size=2, ep_size=2, expert_tp_size=2),
    "PP": RankLayout(world_size=16, num_stages=4),
    "TP, PP, virtual, EP": RankLayout(
        world_size=32, tp_size=2, num_stages=4, num_virtual_stages=2, ep_size=4
    ),
    "virtual, no overlap": RankLayout(
        world_size=16, num_stages=4, num_virtual_stages=3, overlap_transfers=False
    ),
    "stages before ranks": RankLayout(
        world_size=32, tp_size=2, num_stages=4, expert_tp_size=2, stages_last=False
    ),
    "no sequence parallelism": RankLayout(world_size=16, tp_size=2, sequence_parallel=False),
}


def stuck_ranks(plans, layout, stages, steps):
    """Runs the written sequences of all ranks against each other: those that never end.

    A collective ends when all members of its group are at it, a receive when it was sent. Transfers
    that follow each other are one call: none waits for another one of them.
    """
    left = {
        rank: deque(
            one
            for step in steps
            for one in rank_sequence(plan, layout, stages, MOE, rank=rank, step=step)
        )
        for rank, plan in plans.items()
    }
    sent = Counter()

    def transfer(rank):
        """Issues one of the transfers that are next: all sends go, a receive waits."""
        ahead = list(takewhile(lambda one: one.peer >= 0, left[rank]))
        for at, one in enumerate(ahead):
            if one.op == "send" or sent[one.peer, rank]:
                sent[(rank, one.peer) if one.op == "send" else (one.peer, rank)] += (
                    1 if one.op == "send" else -1
                )
                del left[rank][at]
                return True
        return False

    def collect(rank):
        members = left[rank][0].members
        if any(not left[r] or left[r][0][1:] != left[rank][0][1:] for r in members):
            return False
        for member in members:
            left[member].popleft()
        return True

    moved = True
    while moved:
        moved = False
        for rank, sequence in left.items():
            while sequence and (transfer if sequence[0].peer >= 0 else collect)(rank):
                moved = True
    return {rank for rank, sequence in left.items() if sequence}
