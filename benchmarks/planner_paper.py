"""The HBP paper's job: its ablation, and what online scheduling loses where batches are small."""

from collections.abc import Callable

import numpy as np

from benchmarks.planner_figures import Figure, Row, at_least, at_most, between, shown
from benchmarks.planner_speed import LEVELS
from benchmarks.planner_workloads import Workloads
from megatron_hbp import build_plan
from megatron_hbp.baselines import ablation, next_fit, single_level
from megatron_hbp.cost import DENSE_8B_H100
from megatron_hbp.metrics import placement_metrics
from megatron_hbp.online import schedule_online
from megatron_hbp.placement import Placement
from megatron_hbp.report.text import table

NUM_RANKS = 32  # 4 replicas of CP 8
BATCHES = ((8, 16), (32, 8), (64, 4), (32, 1))  # ranks, micro-batches
MIN_EFFICIENCY = 0.99
_CR_RANGE = (0.16, 0.18)
# ABR, CR and GPU days (LLaMA-3.1-8B) of the paper, arXiv 2503.07680; "-": not given
_PAPER = {
    "131072:8 isf": (0.506, 1.0, 5.22),
    "levels": (0.288, 0.173, 4.51),
    "levels + balance": (0.002, 0.173, 3.73),
    "random": ("-", "-", 5.57),
    "sorted": ("-", "-", "-"),
    "first_fit_decreasing": ("-", "-", 5.48),
    "best_fit_decreasing": ("-", "-", "-"),
}
_COLUMNS = {
    "ABR": "attention_balance_ratio",
    "/replica": "attention_balance_ratio_replica",
    "CR": "communication_ratio",
    "DBR": "distribution_balance_ratio",
    "PR": "padding_ratio",
    "eff.": "modelled_efficiency",
}


def paper_ablation(workloads: Workloads) -> Row:
    lens = workloads.lengths("tulu_paper", 0)
    longest = LEVELS[-1]
    found = ablation(lens, LEVELS, NUM_RANKS)
    others: dict[str, Callable[[], Placement]] = {
        "random": lambda: next_fit(lens, longest, NUM_RANKS, order="random"),
        "sorted": lambda: next_fit(lens, longest, NUM_RANKS, order="ascending"),
    }
    for packer in ("first_fit_decreasing", "best_fit_decreasing"):
        others[packer] = lambda packer=packer: single_level(lens, longest, NUM_RANKS, packer=packer)
    for name, method in others.items():
        metrics = placement_metrics(method())
        # the ranks of a replica are alike when all packs have the longest level
        metrics["attention_balance_ratio_replica"] = metrics["attention_balance_ratio"]
        found[name] = metrics
    isf, levels, balanced = (found[name] for name in list(found)[:3])
    # the paper counts by replica; over ranks the step from one level to two is another one
    abr, cr = "attention_balance_ratio_replica", "communication_ratio"
    figures = [
        between("single-level ISF: ABR", isf[abr], (0.40, 0.60), ".3f", 0.0),
        at_most("levels: ABR, lower than that", levels[abr], np.nextafter(isf[abr], 0), ".3f", 0.0),
        at_most("levels + balance: ABR", balanced[abr], 0.002, ".5f", 0.0),
        at_most(
            "levels + balance: ABR over ranks", balanced["attention_balance_ratio"], 0.002, ".5f"
        ),
        between("single-level ISF: CR", isf[cr], (1.0, 1.0), ".3f"),
        between("levels: CR", levels[cr], _CR_RANGE, ".3f", levels[f"{cr}_bound"]),
        between("levels + balance: CR", balanced[cr], _CR_RANGE, ".3f", balanced[f"{cr}_bound"]),
    ]
    rows: list[list[str | int | float]] = [
        ["", *_COLUMNS, "paper ABR", "CR", "days"],
        *(
            [name, *(metrics[column] for column in _COLUMNS.values()), *map(str, _PAPER[name])]
            for name, metrics in found.items()
        ),
    ]
    title = f"tulu_paper, {len(lens)} sequences, {NUM_RANKS} ranks, one micro-batch a step"
    note = "/replica: ABR over the replicas of 131072:8 instead of over ranks, as the paper counts"
    return Row("ablation", title, figures, [note], table(rows))


def efficiency(workloads: Workloads) -> Row:
    """Modelled efficiency of plans, and of online scheduling of each global batch."""
    lens = workloads.lengths("tulu_paper", 0)
    budget = LEVELS[0].tokens_per_rank
    bound = _efficiency_bound(lens)
    figures: list[Figure] = []
    for num_ranks, num_microbatches in BATCHES:
        label = f"{num_ranks} ranks x {num_microbatches}"
        found = build_plan(lens, LEVELS, num_ranks, num_microbatches).metrics()
        value = found["modelled_efficiency"]
        figures.append(at_least(f"{label}: plan", value, MIN_EFFICIENCY, bound=bound))
        for barrier, metric in (
            ("microbatch", "modelled_efficiency"),
            ("step", "modelled_efficiency_step"),
        ):
            placement = schedule_online(lens, budget, num_ranks, num_microbatches, barrier=barrier)
            value = placement_metrics(placement)[metric]
            figures.append(shown(f"{label}: online, ranks wait each {barrier}", value))
    return Row(
        "efficiency",
        "work / (ranks x lockstep time) of an 8B dense model on H100, tulu_paper",
        figures,
        [
            "a rank's time: (48e9 tokens + 0.92e6 sum of squared lengths) / CP / 4e14 s, and "
            "3e-6 s x tokens / CP when CP > 1",
            "bound: each sequence over 16384 tokens pays for CP, and no rank waits",
        ],
    )


def _efficiency_bound(lens: np.ndarray) -> float:
    lens = lens.astype(np.int64)
    squares = (lens * lens).sum(dtype=np.float64)
    work = DENSE_8B_H100.linear * lens.sum() + DENSE_8B_H100.quadratic * squares
    sent = DENSE_8B_H100.communication * lens[lens > LEVELS[0].pack_len].sum()
    return float(work / (work + sent))
