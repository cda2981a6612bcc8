"""The two figures of `make pareto`, as SVG: the same numbers give the same bytes.

Text is drawn as outlines, so that it looks the same without the font. Any other suffix that
matplotlib knows, such as .png, works as well.
"""

# matplotlib is in the bench extra, which `make lint` does not need
# pyright: reportMissingImports=false

from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter

Point = dict[str, Any]  # see planner_pareto.measure()

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.bottom": False,
    "ytick.left": False,
    "svg.hashsalt": "megatron_hbp",
    "svg.fonttype": "path",
}
# below this time places of a curve stand too close together for text
_CROWDED = 1.03
_BLUE, _ORANGE, _GREY, _RED = "#1f5fa8", "#d9730d", "#666666", "#b00020"
# methods that stand close together share a mark
_MARKS = {
    "one level, sequences in any order (in order, random, isf, best_fit)": (
        "s",
        ("one level, in order", "one level, random", "one level, isf", "one level, best_fit"),
    ),
    "one level, sequences by length (ffd, bfd, sorted)": (
        "v",
        ("one level, ffd", "one level, bfd", "one level, sorted"),
    ),
    "levels, unbalanced": ("^", ("levels, unbalanced",)),
    "online": ("X", ("online",)),
    "online, no lockstep (without pipeline only)": ("P", ("online, no lockstep",)),
}
_MODES = ("microbatch", "step")
_BARS = {  # by metric: title with unit, how a value is printed
    "attention_balance_ratio": ("ABR, attention cost\nout of balance (share)", ".4f"),
    "communication_ratio": ("CR, tokens that pay\nfor CP (share)", ".3f"),
    "padding_ratio": ("PR, slots without\na token (share)", ".4f"),
    "tokens_per_rank": ("Ave-T, tokens per rank\nand micro-batch (tokens)", ".0f"),
}


def draw_pareto(found: dict[str, Any], path: Path) -> None:
    """Mixing against modelled time: a row of panels for each workload, one for each pipeline.

    found: see planner_pareto.measure().
    """
    stages = sorted({point["stages"] for here in found.values() for point in here["points"]})
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10, 6.6), layout="constrained")
        rows = figure.subplots(len(found), len(stages), sharex=True, sharey="row", squeeze=False)
        for (name, here), panels in zip(found.items(), rows, strict=True):
            for num, panel in zip(stages, panels, strict=True):
                points = [point for point in here["points"] if point["stages"] == num]
                _draw_panel(panel, points)
                panel.set_title(f"{name}, {num} stage{'s' if num > 1 else ''}")
            most = max(point["time_over_bound"] for point in here["points"])
            panels[0].set_ylim(0.96, 1.03 * most)
            panels[0].set_ylabel("modelled time of an epoch / bound")
        for panel in rows[-1]:
            panel.set_xlabel("mixing ratio (1: random steps)")
        handles, labels = rows[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        _save(figure, path)


def _draw_panel(panel: Axes, points: list[Point]) -> None:
    """One workload and number of stages."""
    panel.axhline(1.0, color=_RED, linewidth=0.8, linestyle="--", label="bound")
    for mode, color, label in (
        ("auto", _BLUE, "plan, mixing auto; numbers: --max-mixing; hollow: no bound"),
        ("step", _ORANGE, "plan, mixing step, the same"),
    ):
        # several bounds on mixing may give the same plan: the largest one names it
        by_place: dict[tuple[float, float], float] = {}
        for point in points:
            if point["method"] == mode:
                by_place.setdefault(_place(point), point["max_mixing"])
        places = sorted(by_place)
        panel.plot(*zip(*places, strict=True), "o-", color=color, ms=4, lw=1.2, label=label)
        no_bound = next(place for place in places if by_place[place] == 0)
        panel.plot(*no_bound, "o", mec=color, mfc="white", ms=5, mew=1.2)
        for place in places:
            if mode == "auto" and by_place[place] >= 2 and place[1] > _CROWDED:
                _note(panel, f"{by_place[place]:g}", place, (4, 3), color=color, size=8)
    for label, (marker, methods) in _MARKS.items():
        places = [_place(point) for point in points if point["method"] in methods]
        panel.plot(
            *(zip(*places, strict=True) if places else ((), ())),
            marker,
            color=_GREY,
            ms=6,
            mew=0.4,
            mec="white",
            label=label,
        )
    panel.set_xscale("log")
    panel.set_xlim(0.75, 18)
    panel.xaxis.set_major_locator(FixedLocator([1, 2, 4, 8, 16]))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.grid(color="#e6e6e6", linewidth=0.6)
    panel.set_axisbelow(True)


def _place(point: Point) -> tuple[float, float]:
    return point["mixing_ratio"], point["time_over_bound"]


def draw_metrics(found: dict[str, Any], path: Path) -> None:
    """ABR, CR, PR and Ave-T of every method as bars, and the bound of each workload.

    found: by workload, `points` of one stage and `bounds`, see planner_pareto.measure().
    """
    with mpl.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(wspace=0.08, w_pad=0.1)
        figure = Figure(figsize=(10, 5.4), layout=layout)
        panels = figure.subplots(1, len(_BARS), sharey=True)
        for panel, (key, (title, form)) in zip(panels, _BARS.items(), strict=True):
            _draw_bars(panel, found, key, form)
            panel.set_title(title)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        _save(figure, path)


def _draw_bars(panel: Axes, found: dict[str, Any], key: str, form: str) -> None:
    height = 0.8 / len(found)
    for index, (name, here) in enumerate(found.items()):
        values = [point[key] for point in one_stage(here)]
        rows = [row + (index - (len(found) - 1) / 2) * height for row in range(len(values))]
        color = (_BLUE, _ORANGE)[index]
        panel.barh(rows, values, height=height * 0.9, color=color, label=name)
        panel.axvline(
            here["bounds"][key], color=color, lw=1.0, linestyle="--", label=f"bound, {name}"
        )
        for row, value in zip(rows, values, strict=True):
            end = panel.get_yaxis_transform()  # x from 0 to 1 over the panel, y in rows
            _note(panel, f"{value:{form}}", (1.0, row), (3, 0), xycoords=end, va="center", size=7)
    methods = [point["method"] for point in one_stage(next(iter(found.values())))]
    panel.set_yticks(
        range(len(methods)),
        [f"plan, mixing {name}" if name in _MODES else name for name in methods],
    )
    panel.set_ylim(len(methods) - 0.5, -0.5)
    panel.xaxis.set_major_locator(MaxNLocator(3))


def _note(
    panel: Axes, text: str, place: tuple[float, float], shift: tuple[float, float], **style: Any
) -> None:
    """Text beside a place; shift: in points."""
    panel.annotate(text, place, xytext=shift, textcoords="offset points", **style)


def one_stage(here: dict[str, Any]) -> list[Point]:
    """A point for each method that packs or batches in its own way; auto is microbatch then."""
    points = (point for point in here["points"] if point["stages"] == 1)
    return [point for point in points if point["method"] != "auto"]


def _save(figure: Figure, path: Path) -> None:
    if path.suffix != ".svg":
        figure.savefig(path, facecolor="white", dpi=110)
        return
    text = StringIO()
    # neither a date nor a version, so that the bytes depend on the numbers only
    figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    lines = (line.strip() for line in text.getvalue().splitlines())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
