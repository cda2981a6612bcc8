"""Lengths as a table: how many sequences have each length, in a small CSV file that can be shared.

    length,count
    128,4021
    131072,3

Guarantees (asserted by tests/unit/test_length_table.py):
- read_lengths() gives every length as often as the file counts it, ascending, whatever is written
  by table_text() comes back the same;
- whatever is no such table is a ValueError with the file and the number of the line.
A table tells lengths only: no order, no sources, no trained tokens.
"""

from pathlib import Path

import numpy as np

HEADER = "length,count"
# More sequences than a plan can number, or a slip of the finger that would fill the memory.
MOST_SEQUENCES = 2**31 - 1
_LONGEST = 2**31 - 1
_RULE = "give lines `length,count`, two whole numbers of 1 or more, lengths ascending"


def read_lengths(path: str | Path) -> np.ndarray:
    """int32 [num_sequences], tokens, ascending. Raises ValueError for a file that is no table."""
    lengths, counts = read_table(path)
    return np.repeat(lengths, counts)


def read_table(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """lengths int32 [num_rows], tokens, ascending; counts int64 [num_rows].

    Raises ValueError for a file that cannot be read or is no table.
    """
    try:
        # a spreadsheet may put a byte order mark first
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"length table {path} cannot be read ({error})") from None
    if not lines or lines[0].strip() != HEADER:
        found = repr(lines[0][:40]) if lines else "nothing"
        raise ValueError(f"length table {path}: line 1 is {found}; it must be `{HEADER}`")
    lengths: list[int] = []
    counts: list[int] = []
    total = 0
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        where = f"length table {path}, line {number}"
        length, count = _row(where, line)
        if lengths and length <= lengths[-1]:
            raise ValueError(f"{where}: length {length} comes after {lengths[-1]}; {_RULE}")
        total += count
        if length > _LONGEST or total > MOST_SEQUENCES:
            raise ValueError(
                f"{where}: a length or the number of sequences so far is above {_LONGEST}; give "
                "smaller counts in the same proportions"
            )
        lengths.append(length)
        counts.append(count)
    if not lengths:
        raise ValueError(f"length table {path} has no row below its header; {_RULE}")
    return np.array(lengths, dtype=np.int32), np.array(counts, dtype=np.int64)


def table_text(lengths: np.ndarray, counts: np.ndarray) -> str:
    """The text of a table, rows as given. lengths ascending, counts 1 or more."""
    rows = zip(lengths.tolist(), counts.tolist(), strict=True)
    return "\n".join([HEADER, *(f"{length},{count}" for length, count in rows)]) + "\n"


def _row(where: str, line: str) -> tuple[int, int]:
    fields = [field.strip() for field in line.split(",")]
    # isdecimal alone would accept the digits of other scripts
    whole = [field.isascii() and field.isdecimal() and len(field) <= 18 for field in fields]
    if len(fields) != 2 or not all(whole) or 0 in (int(fields[0]), int(fields[1])):
        raise ValueError(f"{where} is {line[:60]!r}; {_RULE}")
    return int(fields[0]), int(fields[1])
