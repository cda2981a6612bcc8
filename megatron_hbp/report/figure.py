"""Figures as plain numbers that the page's template draws as SVG.

Positions are percent of the plotting area, from its left and its top, so that one figure fits every
screen: only distances stretch, letters do not.

Guarantees (asserted by tests/unit/test_report_figures.py):
- every mark lies inside the plotting area;
- axes end at ticks with few digits, also where all values are one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mark:
    """A bar (width and height in percent) or a dot (both 0). kind: its CSS class. tip: in words.

    strength: 0 .. 1, how much of its colour it has.
    """

    x: float
    y: float
    width: float
    height: float
    kind: str
    tip: str
    strength: float = 1.0


@dataclass(frozen=True)
class Text:
    """A word at a place: a tick's or a label's. minor: left out on small screens."""

    at: float
    text: str
    minor: bool = False


@dataclass(frozen=True)
class Line:
    """label: written at the line's upper end, `row` lines down."""

    x1: float
    y1: float
    x2: float
    y2: float
    kind: str
    label: str = ""
    row: int = 0


@dataclass(frozen=True, kw_only=True)
class Figure:
    """title: what is to be seen, for those who cannot. height: pixels of the plotting area.

    legend: pairs of a mark's kind and what it means.
    """

    title: str
    height: int
    x_label: str = ""
    y_label: str = ""
    x_ticks: Sequence[Text] = ()
    y_ticks: Sequence[Text] = ()
    marks: Sequence[Mark] = ()
    lines: Sequence[Line] = ()
    legend: Sequence[tuple[str, str]] = field(default_factory=tuple)


@dataclass(frozen=True)
class Axis:
    """A linear axis from its first tick to its last."""

    ticks: tuple[float, ...]
    texts: tuple[str, ...]

    @classmethod
    def over(cls, low: float, high: float, count: int = 4) -> "Axis":
        """About `count` steps of 1, 2 or 5 times a power of ten that hold low .. high.

        0 <= low <= high.
        """
        if not high - low > 1e-9 * max(abs(low), abs(high)):
            room = abs(high) * 0.1 or 1.0
            low, high = (low - room if low > 0 else 0.0), high + room
        rough = (high - low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
        first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
        digits = max(0, -math.floor(math.log10(step) + 1e-6))
        ticks = tuple(index * step for index in range(first, last + 1))
        return cls(ticks, tuple(f"{tick:,.{digits}f}" for tick in ticks))

    def at(self, value: float) -> float:
        """Percent of the way from the first tick to the last."""
        return 100.0 * (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])

    def texts_at(self, *, upwards: bool = False) -> list[Text]:
        """The ticks, from the left, or from the top of an axis that points upwards."""
        places = [self.at(tick) for tick in self.ticks]
        return [
            Text(100.0 - at if upwards else at, text)
            for at, text in zip(places, self.texts, strict=True)
        ]


def short_count(number: int) -> str:
    """A number of tokens in few letters where it is a multiple of 1024: 512, 16K, 1M."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return f"{number:,}"
