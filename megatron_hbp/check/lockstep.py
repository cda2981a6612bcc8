"""The lockstep proof: the collectives that every rank of a run will issue, and that they fit.

Each global rank's view is worked out from what that rank alone knows: the plan that it holds and
its own place. Its sequence is hashed, and so is the part of it that each of its groups sees.

Guarantees (asserted by tests/unit/test_lockstep.py and test_lockstep_plans.py):
- no problem means: in every TP, CP, EP, DP and expert group all members issue the same collectives
  in the same order, on the same pack where they share one; all ranks of a stage interleave them
  alike; what a stage sends, the next one receives, in the same order, and a step ends;
- a problem is one sentence that names ranks, group, step and micro-batch;
- same plan and layout, same hashes.
Memory is some 50 bytes a micro-batch and chunk; packs are read a few steps at a time.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hbp.check.collectives import ModelTraffic, StageWork, Traffic
from megatron_hbp.check.plan_view import PlanView, mixed, plan_problems, text_hash
from megatron_hbp.check.rank_layout import (
    RankLayout,
    cp_groups,
    group_of,
    group_problems,
    places,
)
from megatron_hbp.check.stage_hashes import stage_hashes
from megatron_hbp.check.transfers import transfer_problems
from megatron_hbp.plan import Plan

_MOST_SENTENCES = 5  # of one kind; the rest is counted


@dataclass(frozen=True, kw_only=True)
class Lockstep:
    """What was found. problems: sentences; none when the run stays in lockstep.

    num_collectives: of the rank that issues most, over the whole run, by kind of group; "pp" counts
    its sends and receives. hashes: uint64 [world], of each rank's whole sequence. digest: of all
    of them, 16 hex digits. cp_groups: global ranks of each group, by CP size above 1.
    """

    problems: list[str]
    num_collectives: dict[str, int]
    hashes: np.ndarray
    digest: str
    cp_groups: dict[int, list[tuple[int, ...]]]


def lockstep(
    plan: Plan,
    layout: RankLayout,
    stages: Sequence[StageWork],
    model: ModelTraffic | None = None,
    *,
    others: Mapping[int, Plan] | None = None,
) -> Lockstep:
    """Works out every rank's sequence and compares.

    stages: first to last. others: for a global rank another plan than `plan`, where ranks may hold
    different ones. Raises ValueError when `stages` is not of the layout.
    """
    if len(stages) != layout.num_stages or any(
        len(stage.chunks) != layout.num_virtual_stages for stage in stages
    ):
        raise ValueError(
            f"{len(stages)} stages with {[len(stage.chunks) for stage in stages]} chunks for a "
            f"layout of {layout.num_stages} stages with {layout.num_virtual_stages} virtual stages"
        )
    problems = group_problems(layout)
    plans = [plan]
    held = np.zeros(layout.world_size, dtype=np.int64)
    for rank, other in sorted((others or {}).items()):
        if not any(other is known for known in plans):
            plans.append(other)
        held[rank] = next(i for i, known in enumerate(plans) if known is other)
    for index, known in enumerate(plans):
        holders = np.flatnonzero(held == index)
        whose = "" if len(plans) == 1 else f"the plan of global rank {holders[0]}: "
        problems += [whose + text for text in plan_problems(known, layout)]
    if problems:
        return Lockstep(
            problems=problems,
            num_collectives={},
            hashes=np.zeros(layout.world_size, dtype=np.uint64),
            digest="",
            cp_groups={},
        )
    traffic = Traffic(layout, model or ModelTraffic())
    views = [PlanView(known, layout.num_ranks) for known in plans]
    return _Ranks(layout, stages, traffic, views, held).compared()


@dataclass(frozen=True)
class _Same:
    """What members of a group must share besides their collectives: packs, too, of one CP size."""

    packs: bool
    cp_size: int | None = None


_MUST_BE_SAME = {
    "tp": _Same(True),
    "pp": _Same(True),
    "ep": _Same(False),
    "tp_ep": _Same(False),
    "expert_tp": _Same(False),
    "dp": _Same(False),
    "expert_dp": _Same(False),
    "mp": _Same(False),
}


class _Ranks:
    """Every rank's sequence, as hashes that members of a group can compare."""

    def __init__(
        self,
        layout: RankLayout,
        stages: Sequence[StageWork],
        traffic: Traffic,
        views: list[PlanView],
        held: np.ndarray,
    ) -> None:
        self._layout = layout
        self._views = views
        self._held = held
        self._places = places(layout)
        self._classes = {
            (int(view), int(stage)): stage_hashes(traffic, stages[stage], stage, views[view])
            for view, stage in np.unique(np.stack([held, self._places.stage], axis=1), axis=0)
        }

    def compared(self) -> Lockstep:
        layout, views = self._layout, self._views
        problems = list(self._stage_problems())
        for kind, same in _MUST_BE_SAME.items():
            values = self._by_class(kind)
            if same.packs:
                values = mixed(values ^ self._packs())
            problems += self._group_problems(kind, np.asarray(layout.members(kind)), values, same)
        problems += self._order_problems()
        sizes = sorted({level.cp_size for view in views for level in view.plan.levels} - {1})
        groups = {size: cp_groups(layout, size) for size in sizes}
        for size, members in groups.items():
            values = mixed(self._by_class(f"cp{size}") ^ self._packs(size))
            problems += self._group_problems(f"CP {size}", members, values, _Same(True, size))
        microbatches = {view.plan.num_microbatches for view in views}
        for count in sorted(microbatches):
            problems += transfer_problems(
                layout.num_stages,
                layout.num_virtual_stages,
                count,
                overlap=layout.overlaps,
            )
        hashes = self._own_hashes(groups)
        fullest = max(self._classes.values(), key=lambda known: sum(known.counts.values()))
        return Lockstep(
            problems=problems,
            num_collectives=fullest.counts,
            hashes=hashes,
            digest=hashlib.blake2b(hashes.astype("<u8").tobytes(), digest_size=8).hexdigest(),
            cp_groups={
                size: [tuple(group) for group in members.tolist()]
                for size, members in groups.items()
            },
        )

    def _by_class(self, kind: str) -> np.ndarray:
        """uint64 [world]: of each rank's stage and plan, the hash of one kind's collectives."""
        found = np.zeros(self._layout.world_size, dtype=np.uint64)
        for (view, stage), known in self._classes.items():
            here = (self._held == view) & (self._places.stage == stage)
            found[here] = known.hashes.get(kind, np.uint64(0))
        return found

    def _packs(self, cp_size: int | None = None) -> np.ndarray:
        """uint64 [world]: the hash of each rank's packs, in order; of one CP size, or of all."""
        found = np.zeros(self._layout.world_size, dtype=np.uint64)
        for index, view in enumerate(self._views):
            here = self._held == index
            found[here] = view.pack_hashes(cp_size)[self._places.domain_place[here]]
        return found

    def _stage_problems(self) -> list[str]:
        """Groups whose members must share a stage, or a place in the domain, and do not."""
        found = []
        for kind in ("tp", "dp", "ep", "tp_ep", "expert_tp", "expert_dp"):
            members = np.asarray(self._layout.members(kind))
            stages = self._places.stage[members]
            for group in np.flatnonzero((stages != stages[:, :1]).any(axis=1))[:1]:
                found.append(
                    f"{kind} group {_named(members[group])} holds ranks of the pipeline stages "
                    f"{', '.join(map(str, np.unique(stages[group])))}; they would wait for each "
                    "other in different layers"
                )
        return found

    def _order_problems(self) -> list[str]:
        """All ranks of a stage issue collectives of all kinds in the same order."""
        found: list[str] = []
        values = self._by_class("order")
        for stage in range(self._layout.num_stages):
            ranks = np.flatnonzero(self._places.stage == stage)
            if (values[ranks] != values[ranks[0]]).any():
                found += self._group_problems(
                    f"stage {stage}", ranks[None, :], values, _Same(False)
                )
        return found

    def _group_problems(
        self, name: str, members: np.ndarray, values: np.ndarray, same: "_Same"
    ) -> list[str]:
        of_members = values[members]
        wrong = np.flatnonzero((of_members != of_members[:, :1]).any(axis=1))
        found = []
        for group in wrong[:_MOST_SENTENCES]:
            ranks = members[group]
            first = int(ranks[0])
            other = int(ranks[np.flatnonzero(of_members[group] != of_members[group][0])[0]])
            found.append(f"{name} group {_named(ranks)}: {self._difference(first, other, same)}")
        if len(wrong) > _MOST_SENTENCES:
            found.append(f"{len(wrong) - _MOST_SENTENCES} more {name} groups differ")
        return found

    def _difference(self, first: int, second: int, same: "_Same") -> str:
        """Where two ranks part, in words."""
        a, b = (self._views[self._held[rank]] for rank in (first, second))
        counts = a.plan.num_microbatches, b.plan.num_microbatches
        if counts[0] != counts[1]:
            return (
                f"global rank {first} trains {counts[0]} micro-batches a step, rank {second} "
                f"{counts[1]}; give all ranks the same plan"
            )
        place_a, place_b = (int(self._places.domain_place[rank]) for rank in (first, second))
        where = a.first_difference(place_a, b, place_b, packs=same.packs, cp_size=same.cp_size)
        if where is None:
            return (
                f"global rank {first} in pipeline stage {self._places.stage[first]} and rank "
                f"{second} in stage {self._places.stage[second]} issue different collectives"
            )
        step, microbatch = divmod(where, counts[0])
        return (
            f"in step {step}, micro-batch {microbatch} global rank {first} trains "
            f"{a.described(where, place_a)}, rank {second} {b.described(where, place_b)}; give all "
            "ranks the same plan"
        )

    def _own_hashes(self, groups: dict[int, np.ndarray]) -> np.ndarray:
        """uint64 [world]: the whole sequence of a rank, with the members of its groups."""
        layout = self._layout
        found = mixed(self._by_class("order") ^ self._packs())
        for kind in _MUST_BE_SAME:
            names = _member_hashes(np.asarray(layout.members(kind)), kind)
            found = mixed(found ^ names[group_of(layout, kind)])
        for size, members in groups.items():
            names = _member_hashes(members, f"cp{size}")
            of_rank = np.empty(layout.world_size, dtype=np.int64)
            of_rank[members] = np.arange(len(members))[:, None]
            found = mixed(found ^ names[of_rank])
        return found


def _member_hashes(members: np.ndarray, kind: str) -> np.ndarray:
    """uint64 [groups]."""
    words = members.astype(np.uint64) + np.arange(1, members.shape[1] + 1, dtype=np.uint64) * (
        np.uint64(1) << np.uint64(32)
    )
    return mixed(mixed(words).sum(axis=1, dtype=np.uint64) ^ text_hash(kind))


def _named(ranks: np.ndarray) -> str:
    shown = ", ".join(map(str, ranks[:8].tolist()))
    return f"({shown}{', ...' if len(ranks) > 8 else ''})"
