"""A plan beside what others do with the same sequences, as text and as JSON.

Guarantees (asserted by tests/unit/test_cli.py):
- every metric of every method stands beside the bound of that method;
- no line is wider than 100 columns.
"""

from collections.abc import Callable, Iterator

import numpy as np

from megatron_hbp.baselines import (
    next_fit,
    plan_placement,
    single_level,
    unbalanced_levels,
)
from megatron_hbp.cost import DENSE_8B_H100, PackCost
from megatron_hbp.level import Level
from megatron_hbp.metrics import placement_metrics
from megatron_hbp.online import schedule_online
from megatron_hbp.placement import Placement
from megatron_hbp.plan import Plan
from megatron_hbp.report.text import table

_SINGLE_LEVEL_PACKERS = ("isf", "best_fit", "first_fit_decreasing", "best_fit_decreasing")
# name in the metrics, heading
HEADINGS = {
    "padding_ratio": "PR",
    "communication_ratio": "CR",
    "tokens_per_rank": "Ave-T",
    "modelled_efficiency": "eff.",
    "modelled_efficiency_step": "eff./step",
    "distribution_balance_ratio": "DBR",
    "distribution_balance_ratio_step": "DBR/step",
    "attention_balance_ratio": "ABR",
    "attention_balance_ratio_step": "ABR/step",
    "pipeline_stretch": "stretch",
    "mixing_ratio": "mixing",
    "source_mixing_ratio": "source mixing",
}
_COLUMNS = 100
_LEGEND = """\
Each metric stands beside its bound: the most for Ave-T and efficiency, the least for the others.
PR: padding. DBR, ABR: tokens, attention cost out of balance between ranks. CR: tokens that pay
for context parallelism. Ave-T: tokens per rank and micro-batch. eff.: modelled share of the time
that is work. /step: ranks wait for each other at the end of a step, not in every micro-batch."""


def compare_plan(
    plan: Plan, progress: Callable[[str], None], cost: PackCost = DENSE_8B_H100
) -> dict[str, dict[str, float]]:
    """By method, HBP first: steps_per_epoch and every metric, each with its bound.

    The others get the sequences that the plan keeps, for one epoch. progress is called with a line
    before each method. cost: see placement_metrics().
    """
    compared = {}
    for name, placement, _, sources in placements(plan, progress, cost):
        found = placement_metrics(placement, plan.num_stages, source_ids=sources, cost=cost)
        steps = round(plan.num_steps / plan.epochs) if name == "HBP" else placement.num_steps
        compared[name] = {"steps_per_epoch": steps, **found}
    return compared


def placements(
    plan: Plan, progress: Callable[[str], None], cost: PackCost = DENSE_8B_H100
) -> Iterator[tuple[str, Placement, tuple[Level, ...] | None, np.ndarray | None]]:
    """Name, placement, levels (None: CP sizes as they come) and sources, HBP first.

    Arguments as for compare_plan(); of the plan all epochs are placed. Sources are int32
    [sequences], None where there is one only.
    """
    yield "HBP", plan_placement(plan), plan.levels, plan.source_ids
    kept = plan.seq_lens > 0
    lens = np.ascontiguousarray(plan.seq_lens[kept], dtype=np.int64)
    sources = None if plan.source_ids is None else plan.source_ids[kept]
    methods = _methods(plan, lens, cost)
    for index, (name, (levels, method)) in enumerate(methods.items()):
        progress(f"comparing with {name} ({index + 1} of {len(methods)})")
        yield name, method(), levels, sources


def compare_text(compared: dict[str, dict[str, float]]) -> str:
    """The tables of compare_plan(): a row for each method, as many metrics as fit the width."""
    first = [["method", "steps"]]
    first += [[method, f"{values['steps_per_epoch']:.0f}"] for method, values in compared.items()]
    parts, rows = [_LEGEND], first
    for name, heading in HEADINGS.items():
        if name not in compared["HBP"]:
            continue
        digits = 1 if name == "tokens_per_rank" else 4
        columns = [[heading, "bound"]] + [
            [f"{values[key]:.{digits}f}" for key in (name, f"{name}_bound")]
            for values in compared.values()
        ]
        wider = _beside(rows, columns)
        if len(table(wider).partition("\n")[0]) > _COLUMNS:
            parts.append(table(rows))
            wider = _beside([row[:1] for row in first], columns)
        rows = wider
    return "\n\n".join([*parts, table(rows)])


def _beside(left: list[list[str]], right: list[list[str]]) -> list[list[str]]:
    return [[*row, *more] for row, more in zip(left, right, strict=True)]


def _methods(
    plan: Plan, lens: np.ndarray, cost: PackCost
) -> dict[str, tuple[tuple[Level, ...] | None, Callable[[], Placement]]]:
    """By name, the levels and what places lens: int64 [kept], the lengths that the plan keeps."""
    ranks, microbatches, seed = plan.num_ranks, plan.num_microbatches, plan.seed
    level, multiples = plan.levels[-1], plan.alignment.document_multiples
    longest = f"{level.pack_len}:{level.cp_size}"

    def packed(packer: str) -> Callable[[], Placement]:
        return lambda: single_level(
            lens, level, ranks, microbatches, packer=packer, seed=seed, multiple=multiples[-1]
        )

    def laid_out(order: str) -> Callable[[], Placement]:
        return lambda: next_fit(
            lens, level, ranks, microbatches, order=order, seed=seed, multiple=multiples[-1]
        )

    def online(barrier: str) -> Callable[[], Placement]:
        return lambda: schedule_online(
            lens, plan.token_budget, ranks, microbatches, barrier=barrier, cost=cost, seed=seed
        )

    one = (level,)
    return {
        "levels, unbalanced": (
            plan.levels,
            lambda: unbalanced_levels(
                lens, plan.levels, ranks, microbatches, seed=seed, multiples=multiples
            ),
        ),
        **{f"{longest} {packer}": (one, packed(packer)) for packer in _SINGLE_LEVEL_PACKERS},
        f"{longest} in order": (one, laid_out("input")),
        f"{longest} random": (one, laid_out("random")),
        f"{longest} sorted": (one, laid_out("ascending")),
        "online": (None, online("microbatch")),
        "online, no lockstep": (None, online("step")),
    }
