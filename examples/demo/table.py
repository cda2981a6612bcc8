"""What the plans promised and what the runs took, side by side."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_hbp.plan import Plan


@dataclass(frozen=True)
class Planned:
    """Figures of a plan alone."""

    steps: int
    trained_tokens: int
    padding: float
    communication: float
    imbalance: float
    slowest_tflop: float


@dataclass(frozen=True)
class Measured:
    """Figures of a run, from its step logs and its log."""

    steps: int
    trained_tokens: int
    imbalance: float
    slowest_cpu_seconds: float
    wall_seconds: float
    last_loss: float
    valid_loss: float


def planned(plan: Plan, flops: tuple[float, float], num_trained: np.ndarray) -> Planned:
    """flops: per token, and per squared document length. num_trained: int [sequences]."""
    work = _rank_work(plan, flops)
    metrics = plan.metrics()
    return Planned(
        steps=plan.num_steps,
        trained_tokens=int(num_trained[plan.sequence_ids].sum(dtype=np.int64)),
        padding=metrics["padding_ratio"],
        communication=metrics["communication_ratio"],
        imbalance=_imbalance(work),
        slowest_tflop=float(work.max(axis=1).sum()) / 1e12,
    )


def measured(step_log: Path, log: Path) -> Measured:
    """Reads every rank's step log; every rank must have logged the same steps."""
    ranks = [
        [line for line in map(json.loads, path.read_text().splitlines()) if "step" in line]
        for path in sorted(step_log.glob("rank-*.jsonl"))
    ]
    assert len({len(rank) for rank in ranks}) == 1, "ranks logged different numbers of steps"
    cpu = np.array(
        [[m["cpu_seconds"] for step in rank for m in step["microbatches"]] for rank in ranks]
    ).T
    loss, trained = np.zeros(len(ranks[0])), np.zeros(len(ranks[0]), dtype=np.int64)
    for rank in ranks:
        loss += [sum(m["loss_sum"] for m in step["microbatches"]) for step in rank]
        trained += [sum(m["trained_tokens"] for m in step["microbatches"]) for step in rank]
    found = re.findall(r"lm loss value: (\S+)", log.read_text(errors="replace"))
    last = slice(-max(1, len(loss) // 5), None)
    return Measured(
        steps=len(ranks[0]),
        trained_tokens=int(trained.sum()),
        imbalance=_imbalance(cpu),
        slowest_cpu_seconds=float(cpu.max(axis=1).sum()),
        wall_seconds=float(np.max([[s["wall_seconds"] for s in rank] for rank in ranks], 0).sum()),
        last_loss=float(loss[last].sum() / trained[last].sum()),
        valid_loss=float(found[-1]),
    )


def comparison(
    names: tuple[str, str], plans: tuple[Planned, Planned], runs: tuple[Measured, Measured]
) -> str:
    """A plain text table: the baseline first, HBP second."""
    base, hbp = plans
    base_run, hbp_run = runs
    head = ("", f"planned {names[0]}", f"planned {names[1]}", "saved")
    head += (f"measured {names[0]}", f"measured {names[1]}", "saved")
    rows = [
        head,
        ("optimizer steps", base.steps, hbp.steps, "", base_run.steps, hbp_run.steps, ""),
        (
            "trained tokens",
            base.trained_tokens,
            hbp.trained_tokens,
            "",
            base_run.trained_tokens,
            hbp_run.trained_tokens,
            "",
        ),
        ("padding", f"{base.padding:.1%}", f"{hbp.padding:.1%}", "", "", "", ""),
        (
            "tokens that pay for CP",
            f"{base.communication:.1%}",
            f"{hbp.communication:.1%}",
            _saved(base.communication, hbp.communication),
            "",
            "",
            "",
        ),
        (
            "imbalance between ranks",
            f"{base.imbalance:.1%}",
            f"{hbp.imbalance:.1%}",
            _saved(base.imbalance, hbp.imbalance),
            f"{base_run.imbalance:.1%}",
            f"{hbp_run.imbalance:.1%}",
            _saved(base_run.imbalance, hbp_run.imbalance),
        ),
        (
            "slowest rank: TFLOP | CPU s",
            f"{base.slowest_tflop:.2f}",
            f"{hbp.slowest_tflop:.2f}",
            _saved(base.slowest_tflop, hbp.slowest_tflop),
            f"{base_run.slowest_cpu_seconds:.1f}",
            f"{hbp_run.slowest_cpu_seconds:.1f}",
            _saved(base_run.slowest_cpu_seconds, hbp_run.slowest_cpu_seconds),
        ),
        (
            "wall time, s",
            "",
            "",
            "",
            f"{base_run.wall_seconds:.1f}",
            f"{hbp_run.wall_seconds:.1f}",
            _saved(base_run.wall_seconds, hbp_run.wall_seconds),
        ),
        _loss_row("loss, last fifth", base_run.last_loss, hbp_run.last_loss),
        _loss_row("validation loss at the end", base_run.valid_loss, hbp_run.valid_loss),
    ]
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _loss_row(name: str, base: float, hbp: float) -> tuple[str, ...]:
    return (name, "", "", "", f"{base:.3f}", f"{hbp:.3f}", "")


def _saved(base: float, hbp: float) -> str:
    return f"{1 - hbp / base:.1%}" if base else ""


def _imbalance(work: np.ndarray) -> float:
    """work: [micro-batches, ranks]. Mean share of a micro-batch that ranks wait for the slowest."""
    slowest = work.max(axis=1, keepdims=True)
    return float(((slowest - work) / slowest).mean())


def _rank_work(plan: Plan, flops: tuple[float, float]) -> np.ndarray:
    """float64 [micro-batches, ranks]: FLOP of each rank, by document."""
    per_token, per_square = flops
    lens = plan.seq_lens[plan.sequence_ids].astype(np.float64)
    ends = np.concatenate([[0.0], np.cumsum(lens**2)])
    squares = np.diff(ends[plan.pack_offsets])
    cp_sizes = np.array([level.cp_size for level in plan.levels])
    work = np.empty((len(plan.microbatch_level), plan.num_ranks))
    for m, level in enumerate(plan.microbatch_level):
        packs = squares[plan.microbatch_offsets[m] : plan.microbatch_offsets[m + 1]]
        work[m] = np.repeat(packs, cp_sizes[level]) / cp_sizes[level] * per_square
    return work + per_token * plan.token_budget
