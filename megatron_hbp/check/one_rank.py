"""One GPU of the run in one step: its groups, its packs, and every collective in order.

What a rank of a hanging job should be doing, to be held against the flight recorder of NCCL.

Guarantees (asserted by tests/unit/test_check_one_rank.py): packs and levels are those that the
sampler gives the rank; collectives are check.sequence's.
"""

from collections import Counter
from itertools import groupby
from typing import Any

import numpy as np

from megatron_hbp.check.outcome import Outcome
from megatron_hbp.check.rank_layout import cp_groups, places
from megatron_hbp.check.sequence import rank_sequence
from megatron_hbp.report.text import table


def one_rank_document(found: Outcome, rank: int, step: int) -> dict[str, Any]:
    """rank: global. step: of the plan, from 0. Raises ValueError where there is none to look at."""
    plan, ranks, traffic = found.plan, found.ranks, found.traffic
    if plan is None or ranks is None or traffic is None:
        raise ValueError("--rank needs a run whose stages are built and planned; see the problems")
    if not 0 <= rank < ranks.world_size:
        raise ValueError(f"--rank is {rank}; the run has ranks 0 to {ranks.world_size - 1}")
    if not 0 <= step < plan.num_steps:
        raise ValueError(f"--step is {step}; the plan has steps 0 to {plan.num_steps - 1}")
    where = places(ranks)
    place = int(where.domain_place[rank])
    groups = {
        level.cp_size: _group_of(cp_groups(ranks, level.cp_size), rank) for level in plan.levels
    }
    microbatches = []
    for microbatch in range(plan.num_microbatches):
        index = step * plan.num_microbatches + microbatch
        level = plan.levels[int(plan.microbatch_level[index])]
        pack, _ = plan.pack_index(index, place)
        sequences = plan.pack(pack)
        microbatches.append(
            {
                "microbatch": microbatch,
                "level": str(level),
                "cp_group": groups[level.cp_size],
                "pack": pack,
                "sequences": sequences.tolist(),
                "tokens": int(plan.seq_lens[sequences].sum(dtype=np.int64)),
            }
        )
    issued = rank_sequence(plan, ranks, found.works, traffic, rank=rank, step=step)
    return {
        "rank": rank,
        "step": step,
        "node": rank // found.recipe.gpus_per_node,
        "tp_rank": int(where.tp_rank[rank]),
        "stage": int(where.stage[rank]),
        "place": place,
        "cp_groups": {str(size): group for size, group in groups.items() if size > 1},
        "microbatches": microbatches,
        "collectives": [one._asdict() for one in issued],
    }


def one_rank_text(document: dict[str, Any]) -> str:
    """The document as tables; collectives are counted between changes of direction."""
    rows: list[list[str | int | float]] = [["micro-batch", "level", "pack", "sequences", "tokens"]]
    rows += [
        [str(m["microbatch"]), m["level"], m["pack"], len(m["sequences"]), m["tokens"]]
        for m in document["microbatches"]
    ]
    groups = [f"CP {size}: {_named(group)}" for size, group in document["cp_groups"].items()]
    lines = [
        "",
        f"rank {document['rank']} (node {document['node']}, TP rank {document['tp_rank']}, stage "
        f"{document['stage']}, place {document['place']} of its DP x CP domain) in step "
        f"{document['step']}",
        *groups,
        table(rows),
    ]
    for work, same in groupby(document["collectives"], lambda one: one["work"]):
        counts = Counter((one["op"], tuple(one["members"]), one["peer"]) for one in same)
        parts = [
            f"{count} x {op} with {_named(members) if peer < 0 else peer}"
            for (op, members, peer), count in counts.items()
        ]
        lines.append(f"{work or 'between'}: {'; '.join(parts)}")
    return "\n".join(lines)


def _group_of(groups: np.ndarray, rank: int) -> list[int]:
    return groups[np.flatnonzero((groups == rank).any(axis=1))[0]].tolist()


def _named(ranks: Any) -> str:
    shown = ", ".join(map(str, list(ranks)[:8]))
    return f"{shown}, ... ({len(ranks)})" if len(ranks) > 8 else shown
