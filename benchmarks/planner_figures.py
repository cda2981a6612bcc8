"""Figures with their bars, and the plain text they are printed as."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

_COLUMNS = 100
_WIDTHS = (52, 14, 16, 10, 8)  # figure, measured, bar, bound, result


@dataclass(frozen=True)
class Figure:
    """One number beside what it must be (bar) and what no method can pass (bound).

    met: None where there is no bar. text: how the value is printed.
    """

    name: str
    value: float | None
    text: str
    bar: str = ""
    met: bool | None = None
    bound: float | None = None
    bound_text: str = ""


@dataclass(frozen=True)
class Row:
    """A named part of the benchmark. table: more figures, below; notes: how they were found."""

    name: str
    title: str
    figures: Sequence[Figure]
    notes: Sequence[str] = ()
    table: str = ""

    @property
    def missed(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.met is False]

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"met": not self.missed}


def shown(name: str, value: float, form: str = ".4f", bound: float | None = None) -> Figure:
    """A figure without a bar."""
    return replace(_judged(name, value, "", True, form=form, bound=bound), met=None)


def at_most(
    name: str, value: float, limit: float, form: str = ".4f", bound: float | None = None
) -> Figure:
    return _judged(name, value, f"<= {_text(limit, form)}", value <= limit, form=form, bound=bound)


def at_least(
    name: str, value: float, limit: float, form: str = ".4f", bound: float | None = None
) -> Figure:
    return _judged(name, value, f">= {_text(limit, form)}", value >= limit, form=form, bound=bound)


def between(
    name: str,
    value: float,
    limits: tuple[float, float],
    form: str = ".4f",
    bound: float | None = None,
) -> Figure:
    low, high = limits
    bar = f"{_text(low, form)} .. {_text(high, form)}"
    return _judged(name, value, bar, low <= value <= high, form=form, bound=bound)


def _judged(
    name: str, value: float, bar: str, met: bool, *, form: str, bound: float | None
) -> Figure:
    # NumPy's numbers and truth values are no JSON
    met, value = bool(met), float(value)
    bound = None if bound is None else float(bound)
    return Figure(name, value, _text(value, form), bar, met, bound, _text(bound, form))


def not_run(name: str, why: str) -> Figure:
    """A bar that could not be measured, which is a miss."""
    return Figure(name, None, why, met=False)


def row_text(row: Row) -> str:
    lines = [f"{row.name}: {row.title}", "-" * _COLUMNS]
    for figure in row.figures:
        result = {True: "pass", False: "MISS", None: ""}[figure.met]
        lines.append(_line((figure.name, figure.text, figure.bar, figure.bound_text, result)))
    lines += [f"  {line}" for line in row.table.splitlines()]
    for note in row.notes:
        lines += textwrap.wrap(
            note, _COLUMNS, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def head_text() -> str:
    """The names of the columns of row_text()."""
    return _line(("figure", "measured", "bar", "bound", "result"))


def _line(cells: tuple[str, ...]) -> str:
    return "".join(
        cell.rjust(width) if column else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ).rstrip()


def _text(value: float | None, form: str) -> str:
    """form: a format specification, with a unit after a space if any, e.g. ".1f ms"."""
    if value is None:
        return ""
    specification, _, unit = form.partition(" ")
    return f"{value:{specification}}{' ' if unit and unit != 'x' else ''}{unit}"
