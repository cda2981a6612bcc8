"""One rank's collectives in one step, written out: what the lockstep proof hashes, to be read.

Guarantees (asserted by tests/distributed/test_lockstep.py): for local layers this is what a real
run issues between the first forward and the last backward of a step, on every rank, in order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_hbp.check.collectives import ModelTraffic, StageWork, Traffic
from megatron_hbp.check.rank_layout import RankLayout, group_of, places
from megatron_hbp.check.transfers import stage_actions
from megatron_hbp.pipeline import Work
from megatron_hbp.plan import Plan


class Issued(NamedTuple):
    """work: "forward", "backward", or "" between them. op: as torch.distributed calls it.

    members: global ranks of the group; peer: global rank sent to or received from, else -1.
    """

    work: str
    op: str
    members: tuple[int, ...]
    peer: int


def rank_sequence(
    plan: Plan,
    layout: RankLayout,
    stages: Sequence[StageWork],
    model: ModelTraffic,
    *,
    rank: int,
    step: int,
) -> list[Issued]:
    """From the first forward to the last backward of a step of the plan, on a global rank."""
    where = places(layout)
    stage, place = int(where.stage[rank]), int(where.domain_place[rank])
    traffic = Traffic(layout, model)
    groups = {
        kind: _members(layout, kind, rank) for kind in ("tp", "pp", "ep", "tp_ep", "expert_tp")
    }
    domain = _members(layout, "dp", rank)
    found: list[Issued] = []
    actions = stage_actions(
        stage,
        layout.num_stages,
        layout.num_virtual_stages,
        plan.num_microbatches,
        layout.overlaps,
    )
    for action in actions:
        if not isinstance(action, Work):
            found += [
                Issued("", "send" if one.send else "recv", groups["pp"], groups["pp"][one.peer])
                for one in action
            ]
            continue
        level = int(plan.microbatch_level[step * plan.num_microbatches + action.microbatch])
        cp_size = plan.levels[level].cp_size
        first = place // cp_size * cp_size
        groups["cp"] = domain[first : first + cp_size]
        work = "forward" if action.forward else "backward"
        found += [
            Issued(work, one.op, groups[one.kind], -1)
            for one in traffic.of_work(stages[stage], action, level, cp_size)
        ]
    return found


def _members(layout: RankLayout, kind: str, rank: int) -> tuple[int, ...]:
    members = np.asarray(layout.members(kind))
    return tuple(members[group_of(layout, kind)[rank]].tolist())
