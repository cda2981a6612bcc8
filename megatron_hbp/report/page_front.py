"""The Pareto front as a scatter plot whose two axes the reader chooses, and as a table."""

from typing import Any

from megatron_hbp.report.figure import Axis, Figure, Mark
from megatron_hbp.report.pareto import GOALS, Point, Search

_FIRST_AXES = ("communication_ratio", "attention_balance_ratio")
_ORDER = ("other", "front", "own")  # later ones lie above


def front_figure(search: Search) -> tuple[Figure, dict[str, Any]]:
    """The plot on its first axes, and what page.js needs to draw it on any other two.

    By goal: label, whether more is better, ticks and place of every mark in percent of the axis.
    """
    points = sorted(search.points, key=lambda point: _ORDER.index(_kind(point)))
    goals: dict[str, Any] = {}
    axes: dict[str, Axis] = {}
    for name, heading, more in GOALS:
        values = [point.values[name] for point in points]
        axis = axes[name] = Axis.over(min(values), max(values))
        goals[name] = {
            "heading": heading,
            "label": f"{heading} ({'more' if more else 'less'} is better)",
            "more": more,
            "ticks": [[round(tick.at, 3), tick.text] for tick in axis.texts_at()],
            "at": [round(axis.at(value), 3) for value in values],
        }
    x, y = (goals[name] for name in _FIRST_AXES)
    marks = [
        Mark(x["at"][index], 100 - y["at"][index], 0, 0, _kind(point), _tip(point))
        for index, point in enumerate(points)
    ]
    figure = Figure(
        title=f"{len(points)} packing settings by two of their metrics; the table has the front",
        height=300,
        x_label=x["label"],
        y_label=y["label"],
        x_ticks=axes[_FIRST_AXES[0]].texts_at(),
        y_ticks=axes[_FIRST_AXES[1]].texts_at(upwards=True),
        marks=marks,
        legend=(
            ("own", "settings of this plan"),
            ("front", "no other is as good in every metric"),
            ("other", "another is at least as good in every metric"),
        ),
    )
    return figure, goals | {"axes": list(_FIRST_AXES)}


def front_rows(search: Search) -> list[Point]:
    """The plan's own settings, then the front."""
    return sorted((p for p in search.points if p.own or p.front), key=lambda point: not point.own)


def _kind(point: Point) -> str:
    return "own" if point.own else "front" if point.front else "other"


def _tip(point: Point) -> str:
    values = ", ".join(f"{heading} {point.values[name]:.4g}" for name, heading, _ in GOALS)
    return f"{'this plan: ' if point.own else ''}{point.setting}: {values}"
