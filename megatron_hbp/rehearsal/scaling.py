"""Flags while they are scaled: every change is kept with its reason.

Guarantees (asserted by tests/unit/test_rehearsal_scale.py):
- the changes are exactly the difference between the flags before and after;
- what nothing changes stays as it is, also flags that nothing here knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hbp.recipe import Recipe, Value

_REPEATED = ("hbp-level", "hbp-corpus", "hbp-source-weight")


@dataclass(frozen=True)
class Change:
    """before: None where the flag was not given. after: None where it is taken away."""

    flag: str
    before: Value | None
    after: Value | None
    reason: str

    def __str__(self) -> str:
        parts = [_shown(value) for value in (self.before, self.after)]
        return f"--{self.flag}: {parts[0]} -> {parts[1]} ({self.reason})"


class Scaling:
    """Flags without dashes in front, and what was done to them."""

    def __init__(self, flags: dict[str, Value]) -> None:
        self.flags = {name: value for name, value in flags.items() if value is not False}
        self._before = dict(self.flags)
        self._reasons: dict[str, str] = {}

    def __contains__(self, flag: str) -> bool:
        return flag in self.flags

    def set(self, flag: str, value: Value, reason: str) -> None:
        """Gives a flag a value, also one that was not given."""
        self.flags[flag] = value
        self._reasons[flag] = reason

    def take_away(self, flag: str, reason: str) -> None:
        if self.flags.pop(flag, None) is not None:
            self._reasons[flag] = reason

    def number(self, flag: str, default: int | None = None) -> int:
        """A flag's whole number. Raises ValueError when it has none, or is missing."""
        value = self.flags.get(flag, default)
        if value is None:
            raise ValueError(f"--{flag} is missing; the recipe needs it to be rehearsed")
        try:
            return int(str(value))
        except ValueError:
            raise ValueError(f"--{flag} is {value!r}; give a whole number") from None

    def texts(self, flag: str) -> list[str]:
        """The values of a flag that may be repeated, none when it is not given."""
        value = self.flags.get(flag, [])
        return [str(item) for item in (value if isinstance(value, list) else [value])]

    def changes(self) -> tuple[Change, ...]:
        """In the order of the flags as given, added ones last."""
        names = [*self._before, *(name for name in self.flags if name not in self._before)]
        pairs = [(name, self._before.get(name), self.flags.get(name)) for name in names]
        return tuple(
            Change(name, before, after, self._reasons[name])
            for name, before, after in pairs
            if before != after and not _same(before, after)
        )


def given_flags(recipe: Recipe, more: Sequence[str] = ()) -> dict[str, Value]:
    """A recipe's flags under those of a command line, which win.

    Raises ValueError for words that come before any flag.
    """
    flags: dict[str, Value] = {}
    name = ""
    for word in more:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            if name not in _REPEATED:
                flags.pop(name, None)
            flags.setdefault(name, True)
            if equals:
                _append(flags, name, value)
        elif not name:
            raise ValueError(f"{word!r} follows no flag; write flags as --name value after --")
        else:
            _append(flags, name, word)
    return {k: v for k, v in recipe.flags.items() if k not in flags} | flags


def _append(flags: dict[str, Value], name: str, value: str) -> None:
    before = flags[name]
    if before is True:
        flags[name] = value
    else:
        flags[name] = [*(before if isinstance(before, list) else [str(before)]), value]


def _same(before: Value | None, after: Value | None) -> bool:
    """Whether two values are the same words: 8 and "8" are."""
    kinds = {type(before), type(after)}
    return not kinds & {bool, type(None), list} and str(before) == str(after)


def _shown(value: Value | None) -> str:
    if value is None:
        return "none"
    if value is True:
        return "on"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
