"""Writes a corpus (see store.py).

Guarantees:
- a folder appears under its name whole or not at all; a valid one is never rewritten;
- writing takes the same memory for any number of sequences;
- an interrupted writer goes on from its last checkpoint, with the same bytes as one that was not,
  also when it was interrupted while it finished.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp.corpus.document import ARRAYS, FILES, exists_error, read_document, write_document
from megatron_hbp.corpus.indexed_files import HashingFile, write_index
from megatron_hbp.corpus.store import Corpus
from megatron_hbp.corpus.summary import length_summary

_UINT16_LIMIT = 65500  # vocabularies below it use uint16, as Megatron's own tools do
_COLUMNS = np.dtype(
    list(zip(ARRAYS, ("<i4", "<i4", "<i4", "<i8"), strict=True))  # one record per sequence
)
_CHUNK = 1 << 20  # sequences, when the columns are taken apart
_ADDED_AT_ONCE = 4096  # sequences, by write_corpus


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 or int32, whichever holds every id of the vocabulary."""
    return np.dtype("<u2" if vocab_size < _UINT16_LIMIT else "<i4")


@dataclass(frozen=True)
class Sequences:
    """Sequences one after another.

    tokens: integers [total]. mask: uint8 [total], 1 = trained. columns: records [n] of seq_lens,
    first_trained, num_trained (int32) and row_numbers (int64); see Corpus.
    """

    tokens: np.ndarray
    mask: np.ndarray
    columns: np.ndarray

    @classmethod
    def join(
        cls,
        pairs: list[tuple[np.ndarray, np.ndarray]],
        row_numbers: list[int],
        dtype: np.dtype,
        first: int = 0,
    ) -> "Sequences":
        """Of (tokens, mask) pairs. first: what error messages call the first of them.

        ValueError when shapes differ or nothing of a sequence is trained.
        """
        for index, (tokens, mask) in enumerate(pairs):
            if tokens.ndim != 1 or tokens.shape != mask.shape:
                raise ValueError(
                    f"sequence {first + index}: tokens {tokens.shape} and mask {mask.shape} do not "
                    "match"
                )
        columns = np.zeros(len(pairs), dtype=_COLUMNS)
        if not pairs:
            return cls(np.empty(0, dtype=dtype), np.empty(0, dtype=np.uint8), columns)
        lens = np.array([len(tokens) for tokens, _ in pairs])
        tokens = np.concatenate([pair[0] for pair in pairs], dtype=dtype, casting="unsafe")
        mask = np.concatenate([pair[1] for pair in pairs]) != 0
        starts = np.cumsum(lens) - lens
        target = mask.copy()
        target[starts[lens > 0]] = False  # the first token is never one
        where = np.append(np.flatnonzero(target), len(target))  # of all trained targets
        nth = np.searchsorted(where, starts)
        columns["seq_lens"] = lens
        columns["first_trained"] = where[nth] - starts
        columns["num_trained"] = np.searchsorted(where, starts + lens) - nth
        columns["row_numbers"] = row_numbers
        untrained = np.flatnonzero(columns["num_trained"] == 0)
        if len(untrained):
            raise ValueError(
                f"sequence {first + untrained[0]} has no trained token (the first token is never a "
                "target); leave it out"
            )
        return cls(tokens, mask.view(np.uint8), columns)

    def __len__(self) -> int:
        return len(self.columns)


class CorpusWriter:
    """Writes the files of a corpus into a folder that nobody reads yet (see `staged_folder`).

    vocab_size: number of ids; token ids must be below it. end_id: the end token's id, or -1.
    records: a file of the writer's own, which is no part of the corpus (default: beside the folder;
    whoever made the place removes it). resume: what `checkpoint` returned for this folder; what was
    added after it is forgotten. ChangedFileError when the files are not as they were then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        end_id: int,
        records: Path | None = None,
        resume: dict[str, Any] | None = None,
    ) -> None:
        if not -1 <= end_id < vocab_size:
            raise ValueError(f"end id {end_id} is not below the vocabulary size {vocab_size}")
        state = resume or {
            "files": [None] * 3,
            "count": 0,
            "max_token_id": 0,
            "input_starts": [],
        }
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_id = end_id
        self.dtype = token_dtype(vocab_size)
        self._records = records or folder.with_name(f"{folder.name}.columns")
        paths = (folder / "tokens.bin", folder / "mask.bin", self._records)
        self._files = [
            HashingFile(path, written) for path, written in zip(paths, state["files"], strict=True)
        ]
        self._count = state["count"]
        self._max_token_id = state["max_token_id"]
        self._input_starts = list(state["input_starts"])

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            file.abandon()

    def start_input(self) -> None:
        """Says that what is added next comes from the next input file."""
        self._input_starts.append(self._count)

    def add(self, sequences: Sequences) -> None:
        """Appends sequences. ValueError when a token id is out of range."""
        if len(sequences) == 0:
            return
        least, most = int(sequences.tokens.min()), int(sequences.tokens.max())
        if least < 0 or most >= self._vocab_size:
            wrong = (sequences.tokens < 0) | (sequences.tokens >= self._vocab_size)
            ends = np.cumsum(sequences.columns["seq_lens"])
            index = int(np.searchsorted(ends, np.argmax(wrong), side="right"))
            raise ValueError(
                f"sequence {self._count + index} has token ids from {least} to {most}; they must "
                f"be from 0 to {self._vocab_size - 1}"
            )
        tokens = sequences.tokens.astype(self.dtype, copy=False)
        for file, array in zip(
            self._files, (tokens, sequences.mask, sequences.columns), strict=True
        ):
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
        self._count += len(sequences)
        self._max_token_id = max(self._max_token_id, most)

    def checkpoint(self) -> dict[str, Any]:
        """Brings everything to the disk; returns what `resume` needs, as JSON values."""
        return {
            "files": [file.sync() for file in self._files],
            "count": self._count,
            "max_token_id": self._max_token_id,
            "input_starts": self._input_starts,
        }

    def finish(self, info: dict[str, Any]) -> dict[str, Any]:
        """Writes the index files, the arrays and corpus.json; returns the latter.

        info: further entries of corpus.json (where the data came from). ValueError when no sequence
        was added.
        """
        if self._count == 0:
            raise ValueError("no sequence with a trained token; a corpus needs at least one")
        tokens, mask, _ = self._files
        files = {"tokens.bin": tokens.close(), "mask.bin": mask.close()}
        self._files[2].close()
        for name in ARRAYS:
            path = self._folder / f"{name}.npy"
            files[path.name] = _write_column(path, self._records, name, self._count)
        lengths = np.load(self._folder / "seq_lens.npy", mmap_mode="r")
        for name, dtype in (("tokens.idx", self.dtype), ("mask.idx", np.dtype(np.uint8))):
            files[name] = write_index(self._folder / name, lengths, dtype)
        content = {
            **info,
            "lengths": length_summary(lengths),
            "rows": self._count,
            "tokens": tokens.size // self.dtype.itemsize,
            "trained_tokens": sum(
                int(part["num_trained"].sum(dtype=np.int64)) for part in _read(self._records)
            ),
            "vocab_size": self._vocab_size,
            "max_token_id": self._max_token_id,
            "end_id": self._end_id,
            "input_starts": self._input_starts,
            "files": {name: list(files[name]) for name in FILES},
        }
        return write_document(self._folder, content)


def _read(records: Path) -> Iterator[np.ndarray]:
    # read, not mapped: what is mapped counts as this process's memory
    with records.open("rb") as file:
        while len(part := np.fromfile(file, _COLUMNS, _CHUNK)):
            yield part


def _write_column(path: Path, records: Path, name: str, count: int) -> tuple[int, str]:
    """One field of the records as a .npy file; (bytes, SHA-256)."""
    column = HashingFile(path)
    header = {
        "descr": _COLUMNS[name].str,
        "fortran_order": False,
        "shape": (count,),
    }
    np.lib.format.write_array_header_1_0(column, header)
    for part in _read(records):
        column.write(np.ascontiguousarray(part[name]).data.cast("B"))
    return column.close()


def write_corpus(
    path: str | PathLike,
    sequences: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    vocab_size: int,
    end_id: int,
    info: dict[str, Any] | None = None,
) -> Corpus:
    """Writes (tokens, mask) pairs as a corpus and opens it. See `CorpusWriter` for the errors.

    The same content already at `path` is left alone; ValueError when anything else is there.
    """
    target = Path(path)
    with (
        staged_folder(target) as folder,
        CorpusWriter(folder, vocab_size=vocab_size, end_id=end_id) as writer,
    ):
        pairs: list[tuple[np.ndarray, np.ndarray]] = []
        for tokens, mask in sequences:
            pairs.append((np.asarray(tokens), np.asarray(mask)))
            if len(pairs) == _ADDED_AT_ONCE:
                _add_pairs(writer, pairs)
                pairs = []
        _add_pairs(writer, pairs)
        writer.finish(info or {})
    return Corpus.open(target)


def _add_pairs(writer: CorpusWriter, pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    # int64: ids that the store's own type cannot hold are found, not wrapped around
    writer.add(Sequences.join(pairs, [0] * len(pairs), np.dtype(np.int64), len(writer)))


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target` that takes its name when the block ends well.

    A corpus of the same content that is there by then is left alone, anything else a ValueError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        folder = scratch / "corpus"  # mkdtemp's own folder is closed to other users
        folder.mkdir()
        yield folder
        publish(folder, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish(folder: Path, target: Path) -> None:
    """Gives a finished folder its name. The same content there is left alone, else ValueError."""
    try:
        folder.rename(target)
    except OSError:
        if not target.exists():
            raise
        if _hash_or_none(target) != read_document(folder)["hash"]:
            raise exists_error(target) from None


def _hash_or_none(folder: Path) -> str | None:
    try:
        return Corpus.open(folder).hash
    except ValueError:
        return None
