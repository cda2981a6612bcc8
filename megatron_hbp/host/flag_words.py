"""Flags and numbers in the words of an error."""

from typing import Any


def flag_of(attribute: str) -> str:
    """--num-layers for num_layers."""
    return f"--{attribute.replace('_', '-')}"


def divisors(number: int) -> str:
    """The divisors of a number, the smallest 16 where there are more."""
    found = [size for size in range(1, min(number, 4096) + 1) if number % size == 0]
    return ", ".join(map(str, found[:16])) + (", ..." if len(found) > 16 else "")


def require(condition: Any, message: str) -> None:
    """Raises ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)
