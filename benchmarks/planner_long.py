"""Four levels up to 524288 tokens, with 0 to 60 % of the tokens in long sequences."""

import time

import numpy as np

from benchmarks.planner_figures import Figure, Row, at_most
from benchmarks.planner_workloads import Workloads
from megatron_hbp import Level, build_plan
from megatron_hbp.report.text import table

LEVELS = (Level(16384, 1), Level(131072, 8), Level(262144, 16), Level(524288, 32))
NUM_RANKS, NUM_MICROBATCHES = 64, 8
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
_TOKENS = 400_000_000
_SHORT, _LONG = 32768, (131072, 524288)
_COLUMNS = {
    "PR": "padding_ratio",
    "floor": "padding_ratio_bound",
    "DBR": "distribution_balance_ratio",
    "ABR": "attention_balance_ratio",
    "CR": "communication_ratio",
    "least": "communication_ratio_bound",
    "mixing": "mixing_ratio",
    "eff.": "modelled_efficiency",
}


def long_levels(workloads: Workloads) -> Row:
    figures: list[Figure] = []
    rows: list[list[str | int | float]] = [["long", "sequences", "steps", "s", *_COLUMNS]]
    for share in SHARES:
        lens = _mixture(workloads, share)
        start = time.perf_counter()
        plan = build_plan(lens, LEVELS, NUM_RANKS, NUM_MICROBATCHES)
        seconds = time.perf_counter() - start
        problems = plan.audit(lens)
        figures.append(at_most(f"{share:.0%} long: audit, violations", len(problems), 0, ".0f"))
        metrics = plan.metrics()
        cells = [metrics[column] for column in _COLUMNS.values()]
        rows.append([f"{share:.0%}", len(lens), plan.num_steps, f"{seconds:.2f}", *cells])
    title = " ".join(map(str, LEVELS)) + f", {NUM_RANKS} ranks, {NUM_MICROBATCHES} micro-batches"
    note = (
        f"{_TOKENS / 1e6:.0f}M tokens: tulu's sequences of at most {_SHORT}, and uniform "
        f"{_LONG[0]} .. {_LONG[1]}"
    )
    return Row("long", title, figures, [note], table(rows))


def _mixture(workloads: Workloads, share: float) -> np.ndarray:
    """int64 [n] in random order; `share` of about _TOKENS tokens in long sequences."""
    rng = np.random.Generator(np.random.PCG64(20))
    short = workloads.lengths("tulu", 1_000_000)
    short = short[short <= _SHORT]
    num_long = round(share * _TOKENS / (sum(_LONG) / 2))
    num_short = round((1 - share) * _TOKENS / float(short.mean()))
    lens = np.concatenate(
        [rng.choice(short, num_short), rng.integers(_LONG[0], _LONG[1] + 1, num_long)]
    )
    rng.shuffle(lens)
    return lens
