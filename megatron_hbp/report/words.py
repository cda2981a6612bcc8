"""Numbers as the page says them."""

_SPACE = "\N{NO-BREAK SPACE}"
_UNITS = (("GPU-days", 1.0), ("GPU-hours", 1 / 24), ("GPU-minutes", 1 / 1440))


def percent(share: float, digits: int = 1) -> str:
    """A share of 1, e.g. 24.3 %."""
    return f"{100 * share:.{digits}f}{_SPACE}%"


def counted(number: int, noun: str, ending: str = "s") -> str:
    """E.g. 1 step, 1,902 steps."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def gpu_time(days: float) -> tuple[str, str]:
    """A number of three digits, and the unit that suits it."""
    fitting = [(unit, size) for unit, size in _UNITS if days >= size]
    unit, size = fitting[0] if fitting else ("GPU-seconds", 1 / 86400)
    number = days / size
    return (f"{number:,.0f}" if number >= 100 else f"{number:.3g}"), unit


def gpu_time_text(days: float) -> str:
    """E.g. 1.85 GPU-days."""
    return _SPACE.join(gpu_time(days))


def method_name(name: str) -> str:
    """A method of report/compare.py as a reader says it."""
    words = {"HBP": "this plan", "isf": "ISF"}
    return " ".join(words.get(word, word) for word in name.replace("_", " ").split(" "))
