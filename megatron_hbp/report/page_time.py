"""What a plan takes on a cluster, as words, rows and figures of the page.

Guarantees (asserted by tests/unit/test_report_page.py):
- the parts of a rank's step add up to the step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp.cost_model import CostModel
from megatron_hbp.plan import Plan
from megatron_hbp.report.figure import Axis, Figure, Mark, Text
from megatron_hbp.report.page_balance import spread
from megatron_hbp.report.words import counted, method_name, percent
from megatron_hbp.timeline import Timeline

_THINNEST = 0.01  # percent of the plotting area that can be seen
AS_MUCH = "as much as"
_MOST_RANKS, _MOST_STEPS = 32, 48
_PARTS = {
    "compute": "compute",
    "communication": "communication",
    "wait": "waits for other ranks",
    "bubble": "waits for other pipeline stages",
    "reduction": "gradients between ranks",
}


@dataclass(frozen=True)
class MethodTime:
    """gpu_days: for as many tokens as the plan trains. beside: the plan's gain, in words."""

    name: str
    gpu_days: float
    beside: str = ""
    best: bool = False


def method_rows(gpu_days: dict[str, float]) -> list[MethodTime]:
    """The plan, which comes first in gpu_days, then the others, the fastest first."""
    own, *others = gpu_days.items()
    least = min(gpu_days.values())
    rows = [
        MethodTime(method_name(name), days, saving(own[1], days).rpartition(" ")[0])
        for name, days in sorted(others, key=lambda item: item[1])
    ]
    rows = [MethodTime("this plan", own[1]), *rows]
    return [replace(row, best=row.gpu_days == least) for row in rows]


def saving(own: float, other: float) -> str:
    """What the plan takes beside another method, e.g. 28 % less than."""
    if abs(1 - own / other) < 0.0005:
        return AS_MUCH
    return f"{percent(abs(1 - own / other))} {'less' if own < other else 'more'} than"


def words(timeline: Timeline) -> Iterator[str]:
    """Where the time goes, and who waits for whom."""
    names = {
        "cp_communication": "CP communication",
        "tp_communication": "TP communication",
        "moe_communication": "communication between experts",
        "wait": "waiting for other ranks",
        "bubble": "the pipeline's bubble",
        "reduction": "reducing gradients",
    }
    shares = timeline.shares()
    parts = ", ".join(
        f"{names.get(name, name)} {percent(share)}"
        for name, share in shares.items()
        if share >= 0.0005
    )
    yield (
        f"{counted(timeline.num_steps, 'step')}, {_duration(timeline.total_seconds)} on "
        f"{counted(timeline.cost.layout.world_size, 'GPU')}: "
        f"{timeline.tokens_per_gpu_second:,.0f} tokens a second and GPU, "
        f"{percent(timeline.model_flops_utilization)} of their peak (MFU). "
        f"Of all ranks' time: {parts}."
    )
    waits = timeline.waits()
    idle = float(waits.by_step.sum())
    if idle <= 0:
        yield "No rank ever waits for another."
        return
    causes = {
        "neighbour": "for a slower rank of the same pack or the same experts",
        "reduction": "for the slowest rank at the end of a step",
        "pipeline": "for other pipeline stages",
    }
    told = ", ".join(
        f"{percent(seconds / idle, 0)} {causes[name]}"
        for name, seconds in waits.by_cause.items()
        if seconds / idle >= 0.005
    )
    step = int(waits.worst_steps(1)[0])
    text = f"Of the waiting, {told}; most of it in step {step}"
    if waits.charged.sum() > 0:
        rank = int(waits.worst_ranks(1)[0])
        share = waits.charged[rank] / waits.charged.sum()
        text += f", and most often for rank {rank} ({percent(share, 0)} of the waits for a rank)"
    yield text + "."


def run_figures(timelines: dict[str, Timeline]) -> list[Figure]:
    """The mean rank's time in some steps of runs by name, in training order, to one scale."""
    shown = [spread(timeline.num_steps, _MOST_STEPS) for timeline in timelines.values()]
    pairs = list(zip(timelines.items(), shown, strict=True))
    axis = Axis.over(0.0, max(float(run.seconds[steps].max()) for (_, run), steps in pairs))
    return [_run_figure(run, name, steps, axis) for (name, run), steps in pairs]


def _run_figure(timeline: Timeline, name: str, steps: np.ndarray, axis: Axis) -> Figure:
    width = 100.0 / len(steps)
    marks = []
    for at, step in enumerate(steps.tolist()):
        top = 100.0
        for kind, seconds in _parts(timeline, step):
            mean = float(np.mean(seconds))
            height = axis.at(mean)
            top -= height
            if height >= _THINNEST:
                tip = f"step {step}: {_PARTS[kind]} {mean:.3g} s of {timeline.seconds[step]:.3g} s"
                left = (at + 0.06) * width
                marks.append(Mark(left, top, 0.88 * width, height, kind, tip))
    return Figure(
        title=f"The mean rank's steps, {method_name(name)}",
        height=180,
        x_label=f"step ({len(steps)} of {timeline.num_steps:,})",
        y_label="seconds",
        x_ticks=[
            Text((at + 0.5) * width, f"{steps[at]:,}", minor=index % 2 == 1)
            for index, at in enumerate(spread(len(steps), 5).tolist())
        ],
        y_ticks=axis.texts_at(upwards=True),
        marks=marks,
        legend=_legend(marks),
    )


def step_figures(timeline: Timeline) -> list[Figure]:
    """The fastest and the slowest step and that with most waiting, rank by rank."""
    chosen = {
        int(np.argmin(timeline.seconds)): "the fastest",
        int(np.argmax(timeline.seconds)): "the slowest",
    }
    most = int(timeline.waits().worst_steps(1)[0])
    chosen[most] = f"{chosen[most]}, most waiting" if most in chosen else "most waiting"
    if timeline.num_steps == 1:
        chosen = {0: "the only one"}
    return [_step_figure(timeline, step, name) for step, name in chosen.items()]


def _step_figure(timeline: Timeline, step: int, name: str) -> Figure:
    axis = Axis.over(0.0, float(timeline.seconds[step]))
    ranks = spread(timeline.compute.shape[1], _MOST_RANKS)
    height = 100.0 / len(ranks)
    parts = _parts(timeline, step)
    marks = []
    for at, rank in enumerate(ranks.tolist()):
        left = 0.0
        for kind, seconds in parts:
            width = axis.at(float(seconds[rank]))
            if width >= _THINNEST:
                tip = f"rank {rank}: {_PARTS[kind]} {seconds[rank]:.3g} s"
                marks.append(Mark(left, (at + 0.05) * height, width, 0.9 * height, kind, tip))
            left += width
    shown = "" if len(ranks) == timeline.compute.shape[1] else f", {len(ranks)} of its ranks"
    return Figure(
        title=f"Step {step}, {name}: {timeline.seconds[step]:.3g} s{shown}",
        height=max(56, 8 * len(ranks)),
        x_label="seconds",
        y_label="rank",
        x_ticks=axis.texts_at(),
        y_ticks=[
            Text((at + 0.5) * height, str(ranks[at]))
            for at in spread(len(ranks), 5 if len(ranks) >= 15 else 3).tolist()
        ],
        marks=marks,
    )


def _parts(timeline: Timeline, step: int) -> list[tuple[str, np.ndarray]]:
    """float64 [ranks] seconds of each part; together the step's seconds."""
    by_rank = [(name, getattr(timeline, name)[step]) for name in list(_PARTS)[:-1]]
    reduction = np.full_like(by_rank[0][1], timeline.reduction[step])
    return [*by_rank, ("reduction", reduction)]


def _legend(marks: list[Mark]) -> tuple[tuple[str, str], ...]:
    kinds = {mark.kind for mark in marks}
    return tuple((kind, words) for kind, words in _PARTS.items() if kind in kinds)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} seconds"


def assumptions(plan: Plan, cost: CostModel) -> Iterator[str]:
    """What the prediction rests on, a sentence each."""
    model, device, layout = cost.model, cost.device, cost.layout
    yield (
        f"Model {model.name}: {model.parameters() / 1e9:.1f} billion parameters, "
        f"{model.active_parameters() / 1e9:.1f} billion active for a token."
    )
    yield (
        f"GPU {device.name}: {device.peak_flops / 1e12:,.0f} TFLOP/s at its peak, of which matrix "
        f"products reach {percent(device.matmul_efficiency, 0)} and attention "
        f"{percent(device.attention_efficiency, 0)}; {device.intra_node_bandwidth / 1e9:,.0f} GB/s "
        f"to a GPU of the same node ({device.devices_per_node} a node), "
        f"{device.inter_node_bandwidth / 1e9:,.0f} GB/s to another node."
    )
    yield (
        f"Layout: {layout.world_size:,} GPUs = {layout.num_ranks} ranks x TP {layout.tp_size} x "
        f"{layout.num_stages} pipeline stages ({layout.num_virtual_stages} virtual), expert "
        f"parallelism {layout.ep_size}, {layout.num_microbatches} micro-batches a step."
    )
    for level in plan.levels:
        needed, there = cost.memory(level).total / 2**30, device.memory_bytes / 2**30
        fits = "" if needed <= there else ": it does not fit, so expect to recompute more layers"
        yield f"Level {level}: {needed:.1f} of {there:.1f} GiB on the fullest GPU{fits}."
    yield (
        "One level: all packs at the plan's longest level, with its recompute. Online scheduling "
        "recomputes as few layers as fit. Each method is charged for as many tokens as the plan "
        "trains."
    )
    yield (
        "Not in it: data loading, checkpoints, evaluation, noise between GPUs, sends between "
        "stages. Measure a step before you rely on days."
    )


def measured(timeline: Timeline, step_log: str | Path) -> dict[str, Any]:
    """Words and a figure: the steps of a run beside their prediction.

    Raises ValueError when the folder holds no log of the plan.
    """
    found = timeline.against_log(step_log)
    off = float(np.median(np.abs(found.errors)))
    told = "" if np.isnan(found.correlation) else f", correlation {found.correlation:.3f}"
    problems = " ".join(f"In the log: {problem}." for problem in found.problems)
    text = (
        f"{len(found.steps):,} of {timeline.num_steps:,} steps are in the log. The measured time "
        f"is {found.scale:.4g} times the predicted one (median){told}; scaled by that, half of the "
        f"predictions are within {percent(off)}. {problems}"
    )
    rows = spread(len(found.steps), _MOST_STEPS)
    pairs = {
        "predicted": found.scale * found.predicted[rows],
        "measured": found.measured[rows],
    }
    axis = Axis.over(0.0, max(float(seconds.max()) for seconds in pairs.values()))
    width = 100.0 / len(rows)
    marks = []
    for at, step in enumerate(found.steps[rows].tolist()):
        for place, (kind, seconds) in enumerate(pairs.items()):
            height = axis.at(float(seconds[at]))
            left = (at + 0.06 + 0.44 * place) * width
            tip = f"step {step}: {kind} {seconds[at]:.4g} s"
            marks.append(Mark(left, 100 - height, 0.44 * width, height, kind, tip))
    figure = Figure(
        title="Predicted seconds of steps, scaled, beside those measured",
        height=180,
        x_label=f"step ({len(rows)} of {len(found.steps):,} in the log)",
        y_label="seconds, first forward to last backward",
        x_ticks=[
            Text((at + 0.5) * width, f"{found.steps[rows[at]]:,}", minor=index % 2 == 1)
            for index, at in enumerate(spread(len(rows), 5).tolist())
        ],
        y_ticks=axis.texts_at(upwards=True),
        marks=marks,
        legend=(("predicted", "predicted, scaled"), ("measured", "measured")),
    )
    return {"words": text, "figure": figure}
