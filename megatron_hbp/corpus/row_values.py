"""What rows are made of: parsed JSON or Arrow values, and the reason why a row cannot be used.

Guarantees:
- parsed JSON holds no lone surrogates: each becomes U+FFFD;
- a value of a type that JSON does not have is carried along and never shown as text.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class RowError(ValueError):
    """Why a row is rejected. kind: what the summary counts; the text may add the row's details."""

    def __init__(self, kind: str, text: str | None = None) -> None:
        super().__init__(text or kind)
        self.kind = kind


@dataclass(frozen=True)
class OddValue:
    """A value in a table that JSON does not have, e.g. a date. what: its type, for messages."""

    what: str

    def __str__(self) -> NoReturn:
        # a chat template that prints it would otherwise train on our text
        raise TypeError(f"a value is {self.what}, which is not text")


def parse_json(text: str) -> Any:
    """Parsed JSON. Raises ValueError or RecursionError."""
    value = json.loads(text)
    # only an escape can bring a surrogate into text that was UTF-8
    if "\\u" in text and ("\\ud" in text or "\\uD" in text):
        value = map_strings(value, lambda string: _LONE_SURROGATE.sub("\ufffd", string))
    return value


def map_strings(value: Any, function: Callable[[str], str]) -> Any:
    """A copy of parsed JSON with `function` applied to every string, keys included."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list):
        return [map_strings(item, function) for item in value]
    if isinstance(value, dict):
        return {function(key): map_strings(item, function) for key, item in value.items()}
    return value


def type_name(value: Any) -> str:
    """What a value is, in words for a message."""
    if value is None:
        return "null"
    if isinstance(value, OddValue):
        return value.what
    if isinstance(value, np.ndarray):
        return "a list of numbers"
    names = {str: "text", dict: "an object", list: "a list", bool: "a truth value"}
    return names.get(type(value), "a number")
