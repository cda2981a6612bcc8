"""The collectives of a pipeline stage over a whole plan, hashed and counted.

Guarantees (asserted by tests/unit/test_lockstep.py):
- the hash of a kind depends on that kind's collectives and their order alone: what the rank issues
  on other groups in between does not count;
- counts are those of the sequences written out by sequence.py.
A stage has few different forwards and backwards: one for each chunk and level. Each is hashed once,
a plan then is a table of them.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hbp.check.collectives import Collective, StageWork, Traffic
from megatron_hbp.check.plan_view import PlanView, text_hash
from megatron_hbp.check.transfers import Action, stage_actions
from megatron_hbp.pipeline import Work


@dataclass(frozen=True)
class StageHashes:
    """Of all ranks with the same plan and stage.

    hashes: by kind of group, of the collectives that such a rank issues there, in order; CP groups
    are "cp2", "cp4", ...; "order": of all kinds together. counts: numbers of them, "cp" for all CP
    sizes, "pp" for sends and receives.
    """

    hashes: dict[str, np.uint64]
    counts: dict[str, int]


def stage_hashes(traffic: Traffic, stage: StageWork, index: int, view: PlanView) -> StageHashes:
    """Of the pipeline stage `index`, over a whole plan."""
    layout = traffic.layout
    plan = view.plan
    actions = stage_actions(
        index,
        layout.num_stages,
        layout.num_virtual_stages,
        plan.num_microbatches,
        layout.overlaps,
    )
    lists = [
        [
            _collectives(action, stage, traffic, level, plan.levels[level].cp_size)
            for level in range(len(plan.levels))
        ]
        for action in actions
    ]
    ending = traffic.step_end(stage)
    every = [*(part for of_level in lists for part in of_level), ending]
    kinds = [*sorted({one.kind for part in every for one in part}), "order"]
    hashes, counts = {}, {}
    level_of = view.level_of_step()
    microbatch = np.array([_microbatch(action) for action in actions])
    chosen = level_of[:, microbatch] if len(actions) else level_of[:, :0]
    for kind in kinds:
        table = np.array(
            [[_list_hash(part, kind) for part in of_level] for of_level in lists], dtype=np.uint64
        )
        words = table[np.arange(len(actions)), chosen]
        hashes[kind] = view.ordered(words, _list_hash(ending, kind))
        if kind != "order":
            numbers = np.array(
                [[sum(one.kind == kind for one in part) for part in of_level] for of_level in lists]
            )
            total = int(numbers[np.arange(len(actions)), chosen].sum())
            total += plan.num_steps * sum(one.kind == kind for one in ending)
            plain = "cp" if kind.startswith("cp") else kind
            counts[plain] = counts.get(plain, 0) + total
    # stages do not send the same, but the same number of times in the same steps
    hashes["pp"] = text_hash(f"{plan.num_steps} steps of {plan.num_microbatches} micro-batches")
    return StageHashes(hashes, counts)


def _collectives(
    action: Action, stage: StageWork, traffic: Traffic, level: int, cp_size: int
) -> list[Collective]:
    """What an action issues at a level. CP collectives are told apart by their group's size."""
    if not isinstance(action, Work):
        return [Collective("pp", str(one)) for one in action]
    found = traffic.of_work(stage, action, level, cp_size)
    return [one._replace(kind=f"cp{cp_size}") if one.kind == "cp" else one for one in found]


def _microbatch(action: Action) -> int:
    return action.microbatch if isinstance(action, Work) else action[0].microbatch


def _list_hash(part: list[Collective], kind: str) -> np.uint64:
    mine = [f"{one.kind} {one.op}" for one in part if kind in ("order", one.kind)]
    return text_hash(";".join(mine)) if mine else np.uint64(0)
