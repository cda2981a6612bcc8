"""Reads input files in blocks of rows, and rows out of blocks.

Cutting a file into blocks is cheap and is done by one process; parsing rows is left to others.

Guarantees:
- rows of JSON lines are split at LF only (a CR before it is dropped), so U+2028 and the like stay
  in their row; a byte order mark counts at the start of the file only;
- the rows from any block's end on are the rest of the file's rows, whatever the block size;
- a file that is cut or damaged is a ValueError, never a shorter file;
- memory does not grow with the number of rows.
"""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from megatron_hbp.corpus.columns import read_arrow, read_parquet, to_bytes, to_rows
from megatron_hbp.corpus.inputs import InputFile
from megatron_hbp.corpus.json_array import ArrayError, read_items

_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20
_DAMAGE = (EOFError, OSError, zlib.error)


@dataclass(frozen=True)
class Position:
    """Where the next block starts. at: a byte of the (unpacked) text, or a row from 0 on of a
    table. number: the line or row there, from 1 on."""

    at: int = 0
    number: int = 1


START = Position()


@dataclass(frozen=True)
class Block:
    """Rows that follow each other in one file.

    kind: "lines" (payload: JSON text of one row per line) or "table" (payload: an Arrow stream).
    number: line or row of the first row, from 1 on. end: where the next block starts.
    read: bytes of the file, as it is on disk, that were read for the blocks up to this one.
    """

    kind: str
    payload: bytes
    number: int
    end: Position
    read: int


def read_blocks(
    file: InputFile,
    start: Position = START,
    target_bytes: int = 1 << 20,
    columns: frozenset[str] | None = None,
) -> Iterator[Block]:
    """Yields the file's blocks from `start` on, of about target_bytes each and at least one row.

    columns: of tables, read only these; others keep their name and are null. None: all.
    Raises ValueError that names the file and the place when the file is cut or damaged.
    """
    readers = {"jsonl": _line_blocks, "json": _array_blocks}
    if file.kind in readers:
        yield from readers[file.kind](file, start, target_bytes)
    else:
        yield from _table_blocks(file, start, target_bytes, columns)


def block_rows(block: Block) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """Yields (line or row number, JSON text without line end, or an object for tables).

    A blank line comes as b"".
    """
    if block.kind == "table":
        yield from enumerate(to_rows(block.payload), start=block.number)
        return
    lines = block.payload.split(b"\n")
    if not lines[-1]:
        lines.pop()  # what follows the last LF is no row
    for number, line in enumerate(lines, start=block.number):
        yield number, line.strip(b" \t\r")


def _line_blocks(file: InputFile, start: Position, target_bytes: int) -> Iterator[Block]:
    at, number = start.at, start.number
    rest = b""
    with _Text(file, at) as text:
        while True:
            with _damage_named(file, number - 1):
                block = rest + text.read(max(target_bytes - len(rest), 1))
                cut = block.rfind(b"\n") + 1
                block, rest = block[:cut], block[cut:]
                if not cut:
                    block, rest = _long_row(rest, text, target_bytes)
            if not block:
                return
            payload = block.removeprefix(_BOM) if at == 0 else block
            first = number
            at += len(block)
            number += block.count(b"\n") + (not block.endswith(b"\n"))
            yield Block("lines", payload, first, Position(at, number), text.bytes_read)


def _long_row(begin: bytes, text: "_Text", target_bytes: int) -> tuple[bytes, bytes]:
    """(the row that starts with `begin`, what was read after it)."""
    pieces, rest = [begin], b""
    while piece := text.read(target_bytes):
        end = piece.find(b"\n") + 1
        if end:
            pieces.append(piece[:end])
            rest = piece[end:]
            break
        pieces.append(piece)
    return b"".join(pieces), rest


def _array_blocks(file: InputFile, start: Position, target_bytes: int) -> Iterator[Block]:
    number = start.number
    with _Text(file, start.at) as text:
        blocks = read_items(text.read, start.at, target_bytes)
        while True:
            try:
                with _damage_named(file, number - 1):
                    found = next(blocks, None)
            except ArrayError as error:
                raise ValueError(
                    f"{file.path}:{_line_of(file, error.at)}: the array of rows cannot be read "
                    f"({error}); mend it, or write one row per line into a .jsonl file"
                ) from None
            if found is None:
                return
            items, at = found
            first, number = number, number + len(items)
            payload = b"\n".join(items)
            yield Block("lines", payload, first, Position(at, number), text.bytes_read)


def _line_of(file: InputFile, at: int) -> int:
    """The line, from 1 on, of a byte of the file's text."""
    line, left = 1, at
    with _Text(file, 0) as text:
        while left > 0 and (piece := text.read(min(left, _SKIP_BYTES))):
            line += piece.count(b"\n")
            left -= len(piece)
    return line


def _table_blocks(
    file: InputFile, start: Position, target_bytes: int, columns: frozenset[str] | None
) -> Iterator[Block]:
    row = start.at
    batches = (
        read_parquet(file.path, row, target_bytes, columns)
        if file.kind == "parquet"
        else read_arrow(file.path, row, columns)
    )
    while True:
        try:
            found = next(batches, None)
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"input {file.path} is cut or damaged after row {row} ({reason}); "
                "write or copy it again"
            ) from None
        if found is None:
            return
        batch, share = found
        for piece in _pieces(batch, target_bytes):
            first, row = row + 1, row + piece.num_rows
            end = Position(row, row + 1)
            yield Block("table", to_bytes(piece), first, end, int(share * file.size))


def _pieces(batch: pa.RecordBatch, target_bytes: int) -> Iterator[pa.RecordBatch]:
    num_rows = max(target_bytes * batch.num_rows // max(batch.nbytes, 1), 1)
    return (batch.slice(first, num_rows) for first in range(0, batch.num_rows, num_rows))


class _Text:
    """The text of a file of lines, unpacked, from byte `at` on."""

    def __init__(self, file: InputFile, at: int) -> None:
        self._file = file
        self._damage: Exception | None = None
        try:
            self._raw = file.path.open("rb")
        except OSError as error:
            raise ValueError(f"input {file.path} cannot be read ({error.strerror})") from None
        self._text: Any = gzip.GzipFile(fileobj=self._raw) if file.compressed else self._raw
        try:
            self._skip(at)
        except BaseException:
            self._raw.close()
            raise

    def _skip(self, at: int) -> None:
        left = at
        if not self._file.compressed:
            self._text.seek(at)
            left = max(at - self._file.size, 0)
        with _damage_named(self._file, 0):
            while left and (piece := self.read(min(left, _SKIP_BYTES))):
                left -= len(piece)
        if left:
            raise ValueError(f"input {self._file.path} is shorter than when it was read before")

    def __enter__(self) -> "_Text":
        return self

    def __exit__(self, *exception: object) -> None:
        self._raw.close()

    @property
    def bytes_read(self) -> int:
        """Of the file as it is on disk."""
        return min(self._raw.tell(), self._file.size)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end, or before a place that cannot be read."""
        if self._damage is not None:
            raise self._damage
        pieces = []
        while size > 0:
            try:
                piece = self._text.read1(size)
            except _DAMAGE as error:
                if not pieces:
                    raise
                self._damage = error  # for the next call: what was read until here is good
                break
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


@contextmanager
def _damage_named(file: InputFile, num_rows: int) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(
            f"input {file.path} is cut or damaged after {num_rows} whole rows ({error}); "
            "copy it again"
        ) from None
