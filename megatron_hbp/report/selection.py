"""Chosen levels as plain text and as JSON: ready to paste, with what they cost beside one level.

Guarantees (asserted by tests/unit/test_select_command.py):
- what is printed as flags is read back by `hbp plan` as the same levels;
- JSON holds every number of the text.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_hbp.cost_model import CostModel
from megatron_hbp.level import Level
from megatron_hbp.paper_levels import PaperSelection
from megatron_hbp.prediction import Prediction
from megatron_hbp.report.text import table
from megatron_hbp.select import Rejected, Selection

_GIB = 2**30


def plan_flags(prediction: Prediction, cost: CostModel, fp8_recipe: str | None = None) -> str:
    """The flags of `hbp plan`."""
    flags = [f"--level {level}" for level in prediction.levels]
    flags += [f"--ranks {prediction.num_ranks}", f"--microbatches {_micro(prediction)}"]
    layout = cost.layout
    for flag, value in (
        ("--stages", layout.num_stages),
        ("--virtual-stages", layout.num_virtual_stages),
        ("--tp", layout.tp_size),
    ):
        if value > 1:
            flags.append(f"{flag} {value}")
    if layout.tp_size > 1 and layout.sequence_parallel:
        flags.append("--sequence-parallel")
    if fp8_recipe is not None:
        flags.append(f"--fp8-recipe {fp8_recipe}")
    return " ".join(flags)


def run_flags(prediction: Prediction) -> str:
    """The flags of the run that depend on the levels."""
    slots = prediction.num_ranks * _micro(prediction)
    return f"--seq-length {_budget(prediction)} --global-batch-size {slots}"


def predictions_text(rows: dict[str, Prediction], cost: CostModel) -> str:
    """A table, one row a prediction, GPU-days of one epoch beside the last row's."""
    base = list(rows.values())[-1]
    cells: list[list[str | int | float]] = [
        ["", "levels", "S", "step s", "steps", "GPU-days", "", "CP tokens", "padding", "GiB"]
    ]
    for name, one in rows.items():
        memory = ", ".join(f"{gib:.1f}" for gib in memory_gib(one.levels, cost))
        saved = "" if one is base else f"{100 * (one.gpu_days / base.gpu_days - 1):+.1f} %"
        cells.append(
            [
                name,
                " ".join(map(str, one.levels)),
                _budget(one),
                f"{one.seconds_per_step:.3f}",
                one.num_steps,
                f"{one.gpu_days:.3g}",
                saved,
                f"{100 * one.communication_ratio:.1f} %",
                f"{100 * one.padding:.2f} %",
                memory,
            ]
        )
    card = cost.device.memory_bytes / _GIB
    return (
        f"{table(cells)}\n\nGiB of each level on the fullest GPU; {cost.device.name} has {card:.1f}"
    )


def terms_text(rows: dict[str, Prediction]) -> str:
    """Where the seconds of an epoch go, of each row."""
    names = [name for name in next(iter(rows.values())).terms if _shown(name, rows.values())]
    cells: list[list[str | int | float]] = [["seconds of an epoch", *rows]]
    for name in names:
        cells.append([name.replace("_", " "), *(f"{one.terms[name]:.1f}" for one in rows.values())])
    cells.append(["together", *(f"{one.seconds:.1f}" for one in rows.values())])
    return table(cells)


def rejected_text(rejected: Sequence[Rejected]) -> str:
    """Why each candidate lost, a line each, the fastest first."""
    return "\n".join(f"{one.subject}: {one.reason}" for one in rejected)


def prediction_document(
    one: Prediction, cost: CostModel, fp8_recipe: str | None = None
) -> dict[str, Any]:
    """A prediction with its flags."""
    return {
        **{field.name: getattr(one, field.name) for field in dataclasses.fields(one)},
        "levels": [str(level) for level in one.levels],
        "seq_length": _budget(one),
        "microbatches_per_step": _micro(one),
        "seconds_per_step": one.seconds_per_step,
        "gpu_days": one.gpu_days,
        "memory_gib": memory_gib(one.levels, cost),
        "plan_flags": plan_flags(one, cost, fp8_recipe),
        "run_flags": run_flags(one),
    }


def selection_document(
    found: Selection, cost: CostModel, fp8_recipe: str | None = None
) -> dict[str, Any]:
    """Our selection, static packing beside it, and every candidate that lost."""
    static = found.static
    return {
        "best": prediction_document(found.best, cost, fp8_recipe),
        "static": None if static is None else prediction_document(static, cost, fp8_recipe),
        "rejected": [
            {
                "levels": [str(level) for level in one.levels],
                "seconds": one.seconds,
                "subject": one.subject,
                "reason": one.reason,
            }
            for one in found.rejected
        ],
    }


def paper_document(
    found: PaperSelection,
    prediction: Prediction | None,
    problem: str | None,
    cost: CostModel,
    fp8_recipe: str | None = None,
) -> dict[str, Any]:
    """The paper's selection. problem: why no plan can have its levels."""
    predicted = None if prediction is None else prediction_document(prediction, cost, fp8_recipe)
    return {
        "levels": [str(level) for level in found.levels],
        "seconds_for_equal_tokens": list(found.seconds),
        "equal_tokens": found.equal_tokens,
        "explanation": list(found.explanation),
        "prediction": predicted,
        "problem": problem,
    }


def memory_gib(levels: Iterable[Level], cost: CostModel) -> list[float]:
    """GiB of the fullest GPU, of each level."""
    return [cost.memory(level).total / _GIB for level in levels]


def _budget(prediction: Prediction) -> int:
    return prediction.levels[0].tokens_per_rank


def _micro(prediction: Prediction) -> int:
    return prediction.tokens_per_step // prediction.num_ranks // _budget(prediction)


def _shown(name: str, predictions: Iterable[Prediction]) -> bool:
    return any(abs(one.terms[name]) >= 0.05 for one in predictions)
