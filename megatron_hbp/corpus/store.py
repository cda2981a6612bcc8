"""The corpus on disk: tokens and masks in Megatron's IndexedDataset format, memory-mapped.

A folder holds tokens.bin/.idx (uint16 or int32), mask.bin/.idx (uint8, 1 = trained), seq_lens.npy,
first_trained.npy, num_trained.npy (int32 [N]), row_numbers.npy (int64 [N]) and corpus.json, which
names the size and the SHA-256 of each of them. writer.py makes it.

Guarantees:
- every sequence has a trained token that can be a target, that is at index 1 or later;
- sizes are checked at open, and the content of corpus.json and of files up to 8 MiB; `verify=True`
  checks every byte.

seq_lens.npy repeats the lengths of tokens.idx because there they are not aligned in memory.
"""

from bisect import bisect_right
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp.arrays import load_array
from megatron_hbp.corpus.document import ARRAYS, damaged_error, read_document
from megatron_hbp.corpus.indexed_files import IndexedFiles, file_hash

_HASHED_AT_OPEN = 8 << 20  # bytes


@dataclass(frozen=True, eq=False)
class Corpus:
    """Sequences on disk. Make one with `Corpus.open`.

    seq_lens: int32 [N], tokens. first_trained: int32 [N], index (1 or more) of the first token that
    is trained as a target. num_trained: int32 [N], trained tokens at index 1 or more. row_numbers:
    int64 [N], the line or row of its input that each came from, 0 where it is not known. All of
    them are memory-mapped. source_ids: int32 [N] domain of each sequence, or None. vocab_size: ids
    the tokenizer knows. info: corpus.json whole.
    """

    path: Path
    hash: str
    seq_lens: np.ndarray
    first_trained: np.ndarray
    num_trained: np.ndarray
    row_numbers: np.ndarray
    source_ids: np.ndarray | None
    vocab_size: int
    max_token_id: int
    end_id: int
    tokenizer_path: str
    info: dict[str, Any]
    _tokens: IndexedFiles
    _mask: IndexedFiles

    @classmethod
    def open(cls, path: str | PathLike, *, verify: bool = False) -> "Corpus":
        """Memory-maps a corpus. ValueError when it is missing, of another version or damaged.

        verify: read and hash every byte, also of the large files.
        """
        folder = Path(path)
        info = read_document(folder)
        for name, (size, digest) in info["files"].items():
            file = folder / name
            if not file.is_file():
                raise damaged_error(folder, f"{name} is missing")
            if file.stat().st_size != size:
                raise damaged_error(folder, f"{name} has {file.stat().st_size} bytes, not {size}")
            if (verify or size <= _HASHED_AT_OPEN) and file_hash(file) != digest:
                raise damaged_error(folder, f"{name} does not match its hash")
        try:
            tokens = IndexedFiles.open(folder / "tokens")
            mask = IndexedFiles.open(folder / "mask")
            arrays = {name: load_array(folder / f"{name}.npy") for name in ARRAYS}
        except (OSError, ValueError, EOFError) as error:
            raise damaged_error(folder, str(error)) from None
        if {len(tokens.lengths), len(mask.lengths), *map(len, arrays.values())} != {info["rows"]}:
            raise damaged_error(folder, "its files differ in the number of sequences")
        return cls(
            path=folder,
            hash=info["hash"],
            source_ids=None,
            vocab_size=info["vocab_size"],
            max_token_id=info["max_token_id"],
            end_id=info["end_id"],
            tokenizer_path=info.get("tokenizer_path", ""),
            info=info,
            _tokens=tokens,
            _mask=mask,
            **{name: np.asarray(values) for name, values in arrays.items()},
        )

    def __len__(self) -> int:
        return len(self.seq_lens)

    @property
    def values(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """(tokens uint16 or int32, mask uint8) of all sequences, one after another."""
        return ((self._tokens.values, self._mask.values),)

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(part int32 [n], always 0; start int64 [n]) of sequences in `values`."""
        return np.zeros(len(ids), dtype=np.int32), self._mask.offsets[ids]

    def tokens(self, index: int, length: int | None = None) -> np.ndarray:
        """uint16 or int32 [length]: the first `length` tokens (default all), a read-only view."""
        return self._tokens[index][:length]

    def mask(self, index: int, length: int | None = None) -> np.ndarray:
        """uint8 [length]: 1 where the token is trained, a read-only view."""
        return self._mask[index][:length]

    def origin(self, index: int) -> str | None:
        """Where a sequence came from, e.g. rows.jsonl:17; None when that is not known."""
        starts = self.info.get("input_starts", [])
        if not starts or self.row_numbers[index] == 0:
            return None
        file = self.info["inputs"][bisect_right(starts, index) - 1]["file"]
        return f"{file}:{self.row_numbers[index]}"
