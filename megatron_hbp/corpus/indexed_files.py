"""Reads and writes the .bin/.idx pair of Megatron's IndexedDataset, without Megatron.

The .bin file holds the values of all sequences, one after another. The .idx file is little-endian:
nine bytes of magic, u64 version 1, u8 value type, u64 number of sequences, u64 number of document
ends, then int32 lengths [N], int64 byte offsets [N], int64 document ends [N + 1].

Guarantees:
- one document per sequence;
- writing takes the same memory for any number of sequences;
- a file that was closed is on the disk; one that somebody else wrote into meanwhile, or before the
  writing went on, is a ChangedFileError, never a file with a wrong hash;
- a file that is not of this form, or whose size does not fit its header, is a ValueError.

It does not read sequence modes (multimodal data) or several sequences per document.
"""

import contextlib
import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPE_CODES = {np.dtype("uint8"): 1, np.dtype("<i4"): 4, np.dtype("<u2"): 8}
_TYPES = {code: dtype for dtype, code in _TYPE_CODES.items()}
# sequences whose index entries are made at a time, and bytes that are read at a time
_CHUNK = 1 << 20


def write_index(path: Path, lengths: np.ndarray, dtype: np.dtype) -> tuple[int, str]:
    """Writes the .idx file for sequences of `lengths` values of `dtype`; (bytes, SHA-256).

    lengths: int32 [N], read a piece at a time, so it may be memory-mapped.
    """
    dtype = np.dtype(dtype).newbyteorder("<")
    count = len(lengths)
    index = HashingFile(path)
    index.write(_HEADER.pack(_MAGIC, 1, _TYPE_CODES[dtype], count, count + 1))
    for start in range(0, count, _CHUNK):
        index.write(lengths[start : start + _CHUNK].astype("<i4").data.cast("B"))
    offset = 0
    for start in range(0, count, _CHUNK):
        ends = np.cumsum(lengths[start : start + _CHUNK], dtype=np.int64) * dtype.itemsize
        begins = np.concatenate([[0], ends[:-1]]) + offset
        index.write(begins.astype("<i8").data.cast("B"))
        offset += int(ends[-1])
    for start in range(0, count + 1, _CHUNK):
        ids = np.arange(start, min(start + _CHUNK, count + 1), dtype="<i8")
        index.write(ids.data.cast("B"))
    return index.close()


@dataclass(frozen=True, eq=False)
class IndexedFiles:
    """A memory-mapped pair.

    values: uint8, uint16 or int32 [all values]. lengths: int32 [N]. offsets: int64 [N], bytes into
    the .bin file. lengths and offsets are not aligned in memory (the header is 34 bytes long).
    """

    values: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray

    @classmethod
    def open(cls, prefix: Path) -> "IndexedFiles":
        """Memory-maps PREFIX.bin and PREFIX.idx; ValueError when they are not a whole pair."""
        index_path = prefix.with_suffix(".idx")
        index = np.asarray(np.memmap(index_path, dtype=np.uint8, mode="r"))
        if len(index) < _HEADER.size:
            raise ValueError(f"{index_path} is cut short")
        magic, version, code, count, num_ends = _HEADER.unpack(index[: _HEADER.size].tobytes())
        if magic != _MAGIC or version != 1 or code not in _TYPES or num_ends != count + 1:
            raise ValueError(f"{index_path} is not an index with one document per sequence")
        if len(index) != _HEADER.size + 12 * count + 8 * num_ends:
            raise ValueError(f"{index_path} is not as long as its header says")
        lengths = np.frombuffer(index, dtype="<i4", count=count, offset=_HEADER.size)
        offsets = np.frombuffer(index, "<i8", count=count, offset=_HEADER.size + 4 * count)
        values = np.asarray(np.memmap(prefix.with_suffix(".bin"), dtype=_TYPES[code], mode="r"))
        end = int(offsets[-1]) + int(lengths[-1]) * values.itemsize if count else 0
        if end != values.nbytes:
            raise ValueError(f"{prefix.with_suffix('.bin')} is not as long as its index says")
        return cls(values, lengths, offsets)

    def __getitem__(self, index: int) -> np.ndarray:
        """The values of one sequence: a read-only view of the file."""
        start = int(self.offsets[index]) // self.values.itemsize
        return self.values[start : start + int(self.lengths[index])]


class ChangedFileError(ValueError):
    """A file is not as this program left it."""


class HashingFile:
    """A file being written whose size and SHA-256 are known when it is closed.

    written: (bytes, SHA-256) of an earlier, interrupted writing to go on with; what follows is cut
    off. Raises ChangedFileError when they are not what the file starts with.
    """

    def __init__(self, path: Path, written: tuple[int, str] | None = None) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self.size = 0
        if written is not None:
            self._take_up(*written)
        if self.size == 0:
            path.write_bytes(b"")
        # appends always: what another process may write then shows in the size
        self._file = path.open("ab", buffering=0)

    def _take_up(self, size: int, digest: str) -> None:
        if size:
            try:
                with self._path.open("rb") as file:
                    while data := file.read(min(_CHUNK, size - self.size)):
                        self._digest.update(data)
                        self.size += len(data)
            except FileNotFoundError:
                pass
        if (self.size, self._digest.hexdigest()) != (size, digest):
            raise ChangedFileError(f"{self._path} is not as it was left")
        if size:
            os.truncate(self._path, size)

    def write(self, data: bytes | memoryview) -> None:
        self._check_place()
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self._digest.update(data)
        self.size += len(data)

    def sync(self) -> tuple[int, str]:
        """Brings everything to the disk; (bytes, SHA-256 as hexadecimal text) so far."""
        os.fsync(self._file.fileno())
        self._check_place()
        return self.size, self._digest.hexdigest()

    def _check_place(self) -> None:
        """Finds that another process took the file away, or wrote into it."""
        here = os.fstat(self._file.fileno())
        try:
            alone = os.path.samestat(here, os.stat(self._path)) and here.st_size == self.size
        except FileNotFoundError:
            alone = False
        if not alone:
            raise ChangedFileError(f"{self._path} was changed by another process; run again")

    def close(self) -> tuple[int, str]:
        """As `sync`, and nothing can be written any more."""
        written = self.sync()
        self._file.close()
        return written

    def abandon(self) -> None:
        """Closes the file, whatever becomes of it."""
        with contextlib.suppress(OSError):
            self._file.close()


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
