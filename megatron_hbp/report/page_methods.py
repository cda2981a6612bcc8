"""The plan beside every other method: metrics and predicted GPU-days.

Guarantees (asserted by tests/unit/test_report_page.py):
- every method trains as many tokens as the plan: GPU-days of one epoch are scaled to the plan's;
- a method that cannot run on the model has a reason instead of GPU-days.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_hbp.cost import DENSE_8B_H100
from megatron_hbp.cost_model import CostModel
from megatron_hbp.metrics import placement_metrics
from megatron_hbp.plan import Plan
from megatron_hbp.report.compare import placements
from megatron_hbp.report.figure import Figure
from megatron_hbp.report.page_balance import heat_map
from megatron_hbp.simulate import simulate
from megatron_hbp.timeline import Timeline

HBP = "HBP"


@dataclass(frozen=True)
class Methods:
    """usual: the method that is called usual, everything packed by ISF at the longest level.

    compared: by method, HBP first, steps_per_epoch and all metrics. gpu_days: by method, for as
    many tokens as the plan trains. impossible: by method, why it has none. heat_maps, timelines: of
    the usual method and of HBP; no time line of one that is impossible.
    """

    usual: str
    compared: dict[str, dict[str, float]]
    gpu_days: dict[str, float]
    impossible: dict[str, str]
    heat_maps: dict[str, Figure]
    timelines: dict[str, Timeline]


def compare_methods(
    plan: Plan, timeline: Timeline, cost: CostModel, progress: Callable[[str], None]
) -> Methods:
    """timeline: of the plan, by cost. progress: called with a line before each method."""
    pack_cost = plan.cost or DENSE_8B_H100
    plan_tokens = int(timeline.tokens.sum())
    usual = f"{plan.levels[-1].pack_len}:{plan.levels[-1].cp_size} isf"
    found = Methods(usual, {}, {}, {}, {}, {})
    for name, placement, levels, sources in placements(plan, progress, pack_cost):
        metrics = placement_metrics(placement, plan.num_stages, source_ids=sources, cost=pack_cost)
        steps = round(plan.num_steps / plan.epochs) if name == HBP else placement.num_steps
        found.compared[name] = {"steps_per_epoch": steps, **metrics}
        if name in (HBP, usual):
            found.heat_maps[name] = heat_map(placement, name)
        try:
            run = timeline if name == HBP else simulate(placement, cost, levels)
        except ValueError as error:
            found.impossible[name] = str(error)
            continue
        found.gpu_days[name] = run.gpu_days * plan_tokens / int(run.tokens.sum())
        if name in (HBP, usual):
            found.timelines[name] = run
    return found
