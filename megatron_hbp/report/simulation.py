"""A time line as text and as JSON: where the time goes, what other methods would take, a run's log.

Guarantees (asserted by tests/unit/test_simulate_command.py):
- shares of the time add up to 1, in all and by level;
- every method gets the same tokens: GPU-days of one that was placed for an epoch are scaled to the
  tokens of the plan;
- no line is wider than 100 columns.
"""

from collections.abc import Callable
from textwrap import fill
from typing import Any

import numpy as np

from megatron_hbp.measured import Comparison
from megatron_hbp.metrics import LENGTH_BINS, mixing_ratio
from megatron_hbp.plan import Plan
from megatron_hbp.rank_work import COMMUNICATION
from megatron_hbp.report.compare import placements
from megatron_hbp.report.text import table
from megatron_hbp.simulate import simulate
from megatron_hbp.timeline import Timeline

_SHARES = {
    "compute": "compute",
    "cp_communication": "CP",
    "moe_communication": "MoE",
    "tp_communication": "TP",
    "wait": "wait",
    "bubble": "bubble",
    "reduction": "reduction",
}
_PARTS = {
    "compute": ("compute",),
    "comm.": COMMUNICATION,
    "wait": ("wait",),
    "bubble": ("bubble",),
    "reduce": ("reduction",),
}
_COMPARE_LEGEND = """\
mixing: how far steps are from the corpus, 1 for random ones. Methods that sort have fast steps, but
each of sequences of like length."""
_LEGEND = """\
compute: matrix products, attention, recompute. CP, MoE, TP: communication. wait: for slower ranks.
bubble: for other pipeline stages. reduction: of gradients, where nothing hides it."""
_PER_MICROBATCH = "by level: seconds of a micro-batch and rank, memory of the fullest GPU in GiB"


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    """Everything that timeline_text() tells, as JSON values. Seconds, bytes and shares of 1."""
    waits, layout = timeline.waits(), timeline.cost.layout
    found = timeline.seconds if timeline.num_steps else np.zeros(1)
    return {
        "model": timeline.cost.model.name,
        "device": timeline.cost.device.name,
        "world_size": layout.world_size,
        "notes": list(timeline.cost.notes),
        "steps": timeline.num_steps,
        "step_seconds": {
            "mean": float(found.mean()),
            "p50": float(np.percentile(found, 50)),
            "p99": float(np.percentile(found, 99)),
        },
        "total_seconds": timeline.total_seconds,
        "gpu_days": timeline.gpu_days,
        "tokens_per_gpu_second": timeline.tokens_per_gpu_second,
        "model_flops_utilization": timeline.model_flops_utilization,
        "shares": timeline.shares(),
        "levels": [_level(timeline, index) for index in range(len(timeline.by_level))],
        "waits": {
            "rank_seconds": waits.by_cause,
            "worst_steps": {
                int(step): float(waits.by_step[step]) for step in waits.worst_steps().tolist()
            },
            "worst_ranks": {
                int(rank): float(waits.charged[rank]) for rank in waits.worst_ranks().tolist()
            },
        },
    }


def _level(timeline: Timeline, index: int) -> dict[str, Any]:
    """Seconds of a micro-batch and rank of a level, and the memory that it takes."""
    level = timeline.by_level[index]
    per = 1.0 / max(1, level.num_microbatches * timeline.wait.shape[1])
    compute = sum(value for name, value in level.terms.items() if name not in COMMUNICATION)
    return {
        "level": str(level.level),
        "microbatches": level.num_microbatches,
        "tokens": level.tokens,
        "compute": compute * per,
        **{name: level.terms[name] * per for name in COMMUNICATION},
        "recompute": level.terms["recompute"] * per,
        "wait": level.neighbour * per,
        "bubble": level.bubble * per,
        "filler_share": level.filler / max(sum(level.terms.values()), 1e-300),
        "memory_bytes": float(timeline.cost.memory(level.level).total),
    }


def timeline_text(timeline: Timeline) -> str:
    """The time line in words and tables."""
    document = timeline_document(timeline)
    step, shares, waits = document["step_seconds"], document["shares"], document["waits"]
    head = (
        f"{document['model']} on {document['world_size']} x {document['device']}: "
        f"{document['gpu_days']:.3f} GPU-days, {document['steps']} steps in "
        f"{document['total_seconds'] / 3600:.2f} h\n"
        f"step seconds: mean {step['mean']:.3f}, p50 {step['p50']:.3f}, p99 {step['p99']:.3f}\n"
        f"{document['tokens_per_gpu_second']:.0f} tokens a second and GPU, MFU "
        f"{document['model_flops_utilization']:.1%}"
    )
    share_table = table(
        [["share of the time", *_SHARES.values()], ["", *_percent(shares, _SHARES)]]
    )
    parts = [
        head,
        *map(_wrapped, document["notes"]),
        f"{share_table}\n{_LEGEND}",
        _level_table(timeline),
    ]
    causes = waits["rank_seconds"]
    total = max(timeline.total_seconds * timeline.wait.shape[1], 1e-300)
    words = (
        "ranks wait "
        + ", ".join(
            f"{causes[name] / total:.2%} of the time {why}"
            for name, why in (
                ("neighbour", "for a slower rank in a micro-batch"),
                ("reduction", "for the slowest rank of the step"),
                ("pipeline", "in the pipeline"),
            )
        )
        + "\nmost is lost in steps "
        + _listed(waits["worst_steps"])
        + "\nothers wait most for ranks "
        + _listed(waits["worst_ranks"])
    )
    parts.append(_wrapped(words))
    return "\n\n".join(parts)


def _level_table(timeline: Timeline) -> str:
    rows = [["level", "micro-b.", "compute", "CP", "MoE", "TP", "wait", "bubble", "memory", ""]]
    for index in range(len(timeline.by_level)):
        level = _level(timeline, index)
        fits = level["memory_bytes"] <= timeline.cost.device.memory_bytes
        rows.append(
            [
                level["level"],
                str(level["microbatches"]),
                *(f"{level[name]:.3f}" for name in _SHARES if name in level),
                f"{level['memory_bytes'] / 2**30:.1f}",
                "" if fits else "does not fit",
            ]
        )
    return f"{_PER_MICROBATCH}\n{table(rows)}"


def compare_simulated(
    plan: Plan, timeline: Timeline, progress: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """By method, HBP first: GPU-days for the plan's tokens and more, or why it cannot run.

    timeline: of the plan. progress: see report.compare.placements().
    """
    cost = timeline.cost
    tokens_planned = int(timeline.tokens.sum())
    compared: dict[str, dict[str, Any]] = {}
    for name, placement, levels, _ in placements(plan, progress, cost.pack_cost(plan.levels)):
        try:
            found = timeline if name == "HBP" else simulate(placement, cost, levels)
        except ValueError as error:  # e.g. a CP size that the heads do not allow
            compared[name] = {"impossible": str(error)}
            continue
        lens = placement.seq_lens[placement.sequence_ids]
        classes = np.searchsorted(LENGTH_BINS, lens)
        times = tokens_planned / max(1, int(found.tokens.sum()))
        compared[name] = {
            "gpu_days": found.gpu_days * times,
            "steps": found.num_steps * times,
            "model_flops_utilization": found.model_flops_utilization,
            "mixing_ratio": mixing_ratio(lens, placement.sequence_step(), classes),
            "shares": found.shares(),
        }
    return compared


def compare_simulated_text(compared: dict[str, dict[str, Any]]) -> str:
    """The table of compare_simulated(), and the saving in words."""
    ours = compared["HBP"]["gpu_days"]
    rows = [["method", "GPU-days", "x HBP", "MFU", "mixing", *_PARTS]]
    impossible = []
    for name, found in compared.items():
        if "impossible" in found:
            impossible.append(f"{name}: cannot run: {found['impossible']}")
            continue
        ratio = found["gpu_days"] / ours if ours else 1.0
        rows.append(
            [
                name,
                f"{found['gpu_days']:.3f}",
                f"{ratio:.2f}",
                f"{found['model_flops_utilization']:.1%}",
                f"{found['mixing_ratio']:.2f}",
                *(f"{sum(found['shares'][of] for of in part):.1%}" for part in _PARTS.values()),
            ]
        )
    words = map(_wrapped, [*impossible, saving_text(compared)])
    return "\n\n".join([f"{table(rows)}\n{_COMPARE_LEGEND}", *words])


def saving_text(compared: dict[str, dict[str, Any]]) -> str:
    """What HBP saves against packing at one level, and against the best of all others."""
    ours = compared["HBP"]["gpu_days"]
    others = {
        name: found["gpu_days"]
        for name, found in compared.items()
        if name != "HBP" and "gpu_days" in found
    }
    chosen = [next((name for name in others if name.endswith(" isf")), None)]
    chosen.append(min(others, key=lambda name: others[name]) if others else None)
    sentences = []
    for name, what in zip(chosen, ("single-level packing", "the best other method"), strict=True):
        if name is None or not others[name]:
            continue
        days = others[name]
        verb = "saves" if ours <= days else "costs"
        sentences.append(
            f"HBP takes {ours:.3g} GPU-days, {what} ({name}, mixing "
            f"{compared[name]['mixing_ratio']:.2f}) {days:.3g}: HBP {verb} "
            f"{abs(days - ours):.3g} GPU-days, {abs(1 - ours / days):.0%} ({days / ours:.2f}x)"
        )
    return "\n".join(sentences)


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """A comparison with a step log as JSON values; None for what is not known."""
    return {
        "steps": comparison.steps.tolist(),
        "predicted": comparison.predicted.tolist(),
        "measured": comparison.measured.tolist(),
        "scale": comparison.scale,
        "correlation": _known(comparison.correlation),
        "cpu_correlation": _known(comparison.cpu_correlation),
        "levels": [
            {name: _known(value) for name, value in vars(row).items()}
            for row in comparison.by_level
        ],
        "worst_steps": comparison.steps[comparison.worst()].tolist(),
        "problems": list(comparison.problems),
    }


def comparison_text(comparison: Comparison) -> str:
    """A comparison with a step log as tables."""
    head = (
        f"{len(comparison.steps)} steps logged: measured = {comparison.scale:.4g} x predicted "
        f"(median), correlation {comparison.correlation:.3f}, half of the steps within "
        f"{np.median(np.abs(comparison.errors)):.1%} of that"
    )
    if not np.isnan(comparison.cpu_correlation):
        head += (
            f"\nCPU seconds of every rank's micro-batches: correlation "
            f"{comparison.cpu_correlation:.3f}"
        )
    levels = [["level", "micro-batches", "predicted s", "measured s", "of a rank", "CPU s"]]
    for row in comparison.by_level:
        times = (row.predicted, row.measured, row.predicted_rank, row.measured_cpu)
        levels.append([row.level, str(row.num_microbatches), *map(_seconds, times)])
    steps = [["worst steps", "predicted s", "measured s", "off by"]]
    for at in comparison.worst().tolist():
        times = float(comparison.predicted[at]), float(comparison.measured[at])
        off = f"{comparison.errors[at]:+.1%}"
        steps.append([str(comparison.steps[at]), *map(_seconds, times), off])
    return "\n\n".join([_wrapped(head), *comparison.problems, table(levels), table(steps)])


def _percent(shares: dict[str, float], names: dict[str, str]) -> list[str]:
    return [f"{shares[name]:.1%}" for name in names]


def _listed(seconds: dict[int, float]) -> str:
    return ", ".join(f"{index} ({value:.1f} rank-seconds)" for index, value in seconds.items())


def _seconds(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.4g}"


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and np.isnan(value) else value


def _wrapped(text: str) -> str:
    """The lines of a text of words, at most 100 columns wide."""
    return "\n".join(fill(line, 100, break_long_words=False) for line in text.splitlines())
