"""How evenly the ranks of a micro-batch are loaded, before and after: heat maps of the page.

Guarantees (asserted by tests/unit/test_report_page.py):
- a cell is a rank's attention cost over that of the busiest rank of the same micro-batch;
- the micro-batches shown are spread evenly over the run, the first and the last among them.
"""

import numpy as np

from megatron_hbp.placement import Placement
from megatron_hbp.report.figure import Figure, Mark, Text
from megatron_hbp.report.words import counted, method_name, percent

_MOST_MICROBATCHES, _MOST_RANKS = 24, 64


def attention_loads(placement: Placement) -> np.ndarray:
    """float64 [micro-batches, ranks]: attention cost over the busiest rank's, 0 .. 1."""
    lens = placement.seq_lens[placement.sequence_ids].astype(np.int64)
    costs = placement.rank_sums(placement.pack_sums(lens * lens) / placement.pack_cp)
    busiest = costs.max(axis=1, keepdims=True)
    return np.divide(costs, busiest, out=np.zeros_like(costs), where=busiest > 0)


def spread(num: int, most: int) -> np.ndarray:
    """int64: at most `most` of 0 .. num - 1, evenly spread, both ends among them."""
    return np.unique(np.rint(np.linspace(0, num - 1, min(num, most))).astype(np.int64))


def heat_map(placement: Placement, name: str) -> Figure:
    """Micro-batches from left to right, ranks from top to bottom."""
    loads = attention_loads(placement)
    columns, rows = spread(len(loads), _MOST_MICROBATCHES), spread(loads.shape[1], _MOST_RANKS)
    step_of = np.searchsorted(placement.step_offsets, columns, side="right") - 1
    width, height = 100.0 / len(columns), 100.0 / len(rows)
    marks = []
    for at, (column, step) in enumerate(zip(columns.tolist(), step_of.tolist(), strict=True)):
        shown = loads[column, rows]
        # ranks that share a pack are one cell
        starts = np.flatnonzero(np.concatenate([[True], shown[1:] != shown[:-1]]))
        ends = np.append(starts[1:], len(shown))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            load = float(shown[start])
            ranks = f"rank {rows[start]}"
            if end - start > 1:
                ranks = f"ranks {rows[start]}-{rows[end - 1]}"
            tip = f"step {step}, micro-batch {column}, {ranks}: {percent(load)} of the busiest rank"
            marks.append(
                Mark(
                    at * width,
                    start * height,
                    width * 0.92,
                    (end - start) * height,
                    "load",
                    tip,
                    round(load, 3),
                )
            )
    return Figure(
        title=f"Attention cost of each rank in some micro-batches, {method_name(name)}",
        height=max(64, min(192, 6 * len(rows))),
        x_label=f"{len(columns)} of {counted(len(loads), 'micro-batch', 'es')}",
        y_label="ranks" if len(rows) == loads.shape[1] else f"{len(rows)} of the ranks",
        x_ticks=[
            Text((at + 0.46) * width, f"{columns[at]:,}", minor=0 < index < 3)
            for index, at in enumerate(spread(len(columns), 4).tolist())
        ],
        y_ticks=[Text((at + 0.5) * height, str(rows[at])) for at in spread(len(rows), 2).tolist()],
        marks=marks,
    )
