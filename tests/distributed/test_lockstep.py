"""What the lockstep proof says a rank issues is what it issues: real runs, every rank, in order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from megatron_hbp.check.collectives import ModelTraffic, StageWork, Traffic, stage_work
from megatron_hbp.check.lockstep import lockstep
from megatron_hbp.check.rank_layout import RankLayout, group_of
from megatron_hbp.check.sequence import rank_sequence
from megatron_hbp.level import Level
from megatron_hbp.plan import Plan
from tests.distributed import flags, handmade
from tests.distributed.layouts import Layout, slot_corpus

MLA = ModelTraffic(latent_attention=True, q_lora=True)
MOE = replace(MLA, shared_experts=True, aux_loss=True)
MLA_MOE = [*flags.MLA, *flags.moe("aux_loss")]


def left_out(words: Sequence[str], *names: str) -> list[str]:
    """Flags without some that have one value."""
    gone = {place + i for place, word in enumerate(words) if word in names for i in (0, 1)}
    return [word for place, word in enumerate(words) if place not in gone]


@dataclass(frozen=True, kw_only=True)
class Case:
    """layers: 4, or as the flags say. cp_sizes: of each micro-batch of the run."""

    layout: Layout
    levels: tuple[str, ...]
    cp_sizes: tuple[int, ...]
    model: ModelTraffic
    flags: Sequence[str]
    num_layers: int = 4
    dense_layers: int = 1
    virtual: int = 1
    sequence_parallel: bool = True
    overlap: bool = True


CASES = {
    "everything": Case(
        layout=Layout(2, tp_size=2, pp_size=2, ep_size=2, num_microbatches=4),
        levels=("64:1:4", "128:2:full"),
        cp_sizes=(1, 2, 2, 1, 2, 1, 1, 1),
        model=MOE,
        flags=[*MLA_MOE, "--num-layers-per-virtual-pipeline-stage", "1"],
        virtual=2,
    ),
    "four stages without overlap": Case(
        layout=Layout(2, pp_size=4, ep_size=2, num_microbatches=8),
        levels=("64:1", "128:2:full"),
        cp_sizes=(1, 2, 2, 1, 1, 1, 2, 2),
        model=replace(MOE, aux_loss=False),
        flags=[
            *left_out([*flags.MLA, *flags.moe()], "--moe-layer-freq"),
            *("--moe-layer-freq", "([0]*1+[1]*7)", "--num-layers", "8"),
            *("--num-layers-per-virtual-pipeline-stage", "1", "--no-overlap-p2p-communication"),
        ],
        num_layers=8,
        virtual=2,
        overlap=False,
    ),
    "dense, three micro-batches": Case(
        layout=Layout(2, tp_size=2, pp_size=2, num_microbatches=3),
        levels=("64:1", "128:2:3"),
        cp_sizes=(1, 2, 2, 2, 1, 2),
        model=ModelTraffic(),
        flags=flags.GQA,
        dense_layers=4,
    ),
    "experts over TP and ranks": Case(
        layout=Layout(2, tp_size=2, ep_size=4),
        levels=("64:1", "128:2:2"),
        cp_sizes=(1, 2),
        model=ModelTraffic(aux_loss=True),
        flags=left_out(
            [*flags.GQA, *flags.moe("aux_loss")], "--moe-shared-expert-intermediate-size"
        ),
    ),
    "the allgather dispatcher": Case(
        layout=Layout(4, ep_size=2),
        levels=("64:1", "128:2", "256:4:full"),
        cp_sizes=(1, 4, 2, 1),
        model=replace(MOE, dispatcher="allgather"),
        flags=[*MLA_MOE, "--moe-token-dispatcher-type", "allgather", "--use-distributed-optimizer"],
    ),
    "MLA without sequence parallelism": Case(
        layout=Layout(2, tp_size=2),
        levels=("64:1", "128:2:full"),
        cp_sizes=(1, 2),
        model=MLA,
        flags=flags.MLA,
        dense_layers=4,
        sequence_parallel=False,
    ),
    "MLA without compressed queries": Case(
        layout=Layout(1, tp_size=2),
        levels=("64:1",),
        cp_sizes=(1, 1),
        model=replace(MLA, q_lora=False),
        flags=left_out(flags.MLA, "--q-lora-rank"),
        dense_layers=4,
    ),
}


def plan_of(case: Case, folder) -> Plan:
    layout = case.layout
    slots = handmade.exact_slots(len(case.cp_sizes) * layout.num_ranks, layout.budget)
    corpus, ids = slot_corpus(folder / "corpus", slots)
    path = handmade.regrouped(
        folder / "plan",
        corpus,
        ids,
        list(case.cp_sizes),
        budget=layout.budget,
        num_ranks=layout.num_ranks,
        num_microbatches=layout.num_microbatches,
        levels=tuple(map(Level.parse, case.levels)),
        tp_size=layout.tp_size if case.sequence_parallel else 1,
    )
    return Plan.load(path)


def ranks_of(case: Case) -> RankLayout:
    return RankLayout(
        world_size=case.layout.world_size,
        tp_size=case.layout.tp_size,
        num_stages=case.layout.pp_size,
        num_virtual_stages=case.virtual,
        ep_size=case.layout.ep_size,
        sequence_parallel=case.sequence_parallel,
        overlap_transfers=case.overlap,
    )


def stages_of(case: Case, plan: Plan) -> list[StageWork]:
    num_stages = case.layout.pp_size
    num_chunks = num_stages * case.virtual
    each = case.num_layers // num_chunks
    stages = []
    for stage in range(num_stages):
        starts = [each * chunk for chunk in range(stage, num_chunks, num_stages)]
        dense = [min(max(case.dense_layers - start, 0), each) for start in starts]
        stages.append(
            stage_work(
                plan.levels,
                num_chunks=num_chunks,
                dense_layers=dense,
                moe_layers=[each - number for number in dense],
            )
        )
    return stages


def record(cluster, case: Case, plan: Plan, *more: str) -> list[list[list[Any]]]:
    """Of each rank and step, the recorded events."""
    given = case.layout.flags()
    if not case.sequence_parallel:
        given.remove("--sequence-parallel")
    argv = [*flags.COMMON, *flags.SIZE, *given, "--hbp-plan", str(plan.folder), *case.flags, *more]
    found = cluster.run(
        case.layout.world_size, "tests.distributed.jobs_collectives:train", argv=argv
    )
    steps = []
    for rank in found:
        starts = [at for at, event in enumerate(rank["events"]) if event[0] == "next step"]
        ends = [*starts[1:], len(rank["events"])]
        steps.append([rank["events"][a + 1 : b] for a, b in zip(starts, ends, strict=True)])
    return steps


def between(events: list[Any]) -> list[tuple]:
    """Recorded: what belongs to forwards, backwards and transfers. A transfer's group is left out:
    of two stages that overlap, the host sends one direction over the group of all ranks.
    """
    found = []
    for work, members, op, peer in events:
        if op in ("send", "recv"):
            found.append(("", op, peer))
        elif work in ("forward", "backward") and op != "begins":
            found.append((work, op, members))
    return found


def predicted(case: Case, plan: Plan, *, rank: int, step: int) -> list[tuple]:
    sequence = rank_sequence(
        plan, ranks_of(case), stages_of(case, plan), case.model, rank=rank, step=step
    )
    return [(one.work, one.op, one.members if one.peer < 0 else one.peer) for one in sequence]


def members_of(layout: RankLayout, kind: str, rank: int) -> tuple[int, ...]:
    return tuple(np.asarray(layout.members(kind))[group_of(layout, kind)[rank]].tolist())


@pytest.mark.parametrize("name", CASES)
def test_every_rank_issues_what_is_predicted(cluster, tmp_path, name):
    case = CASES[name]
    plan = plan_of(case, tmp_path)
    steps = record(cluster, case, plan, "--log-interval", "1000")
    layout, stages = ranks_of(case), stages_of(case, plan)
    assert lockstep(plan, layout, stages, case.model).problems == []
    for rank, of_rank in enumerate(steps):
        assert len(of_rank) == plan.num_steps
        for step, events in enumerate(of_rank):
            assert between(events) == predicted(case, plan, rank=rank, step=step), (rank, step)

    # after the last backward: gradients, token counts, norms
    everyone = tuple(range(layout.world_size))
    for rank, of_rank in enumerate(steps):
        stage = int(np.flatnonzero(np.asarray(members_of(layout, "pp", rank)) == rank)[0])
        ending = Traffic(layout, case.model).step_end(stages[stage])
        wanted = {members_of(layout, one.kind, rank) for one in ending}
        for events in of_rank:
            used = {e[1] for e in events if e[0] == "step" and e[2] not in ("send", "recv")}
            assert used - {everyone} == {m for m in wanted if len(m) > 1} - {everyone}


def test_members_of_every_group_see_the_same_in_a_whole_run(cluster, tmp_path):
    """Start-up, ends of steps and the log included, which the prediction leaves out."""
    case = CASES["everything"]
    plan = plan_of(case, tmp_path)
    steps = record(cluster, case, plan, "--log-interval", "1")
    for step in range(plan.num_steps):
        seen: dict[tuple[int, ...], dict[int, list[str]]] = {}
        for rank, of_rank in enumerate(steps):
            for _, members, op, _ in of_rank[step]:
                if len(members) > 1 and op not in ("send", "recv", "begins"):
                    seen.setdefault(members, {}).setdefault(rank, []).append(op)
        for members, by_rank in seen.items():
            assert set(by_rank) == set(members)
            assert len({tuple(ops) for ops in by_rank.values()}) == 1, members

    # the log adds one sum over the ranks to the last forward of the last stage, and nothing else
    layout = ranks_of(case)
    for rank in range(layout.world_size):
        last = rank in np.asarray(layout.members("pp"))[:, -1]
        for step in range(plan.num_steps):
            expected = predicted(case, plan, rank=rank, step=step)
            recorded = between(steps[rank][step])
            if last:
                log = ("forward", "all_reduce", members_of(layout, "dp", rank))
                assert recorded.count(log) == expected.count(log) + 1
                recorded.remove(log)
            assert recorded == expected
