"""The corpus on disk: tokens and masks in Megatron's IndexedDataset format, memory-mapped.

A folder holds tokens.bin/.idx (uint16 or int32), mask.bin/.idx (uint8, 1 = trained), seq_lens.npy,
first_trained.npy, num_trained.npy (int32 [N]) and corpus.json, which names the size and the SHA-256
of each of them.

Guarantees:
- a folder appears under its name whole or not at all; a valid one is never rewritten;
- every sequence has a trained token that can be a target, that is at index 1 or later;
- sizes are checked at open, and the content of corpus.json and of files up to 8 MiB; `verify=True`
  checks every byte;
- writing keeps 12 bytes per sequence in memory.

seq_lens.npy repeats the lengths of tokens.idx because there they are not aligned in memory.
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp.corpus.indexed_files import IndexedFiles, IndexedWriter, file_hash

FORMAT_VERSION = 1
DOCUMENT = "corpus.json"
_HASHED_AT_OPEN = 8 << 20  # bytes
_UINT16_LIMIT = 65500  # vocabularies below it use uint16, as Megatron's own tools do
_ARRAYS = ("seq_lens", "first_trained", "num_trained")
_FILES = ("tokens.bin", "tokens.idx", "mask.bin", "mask.idx", *(f"{n}.npy" for n in _ARRAYS))


@dataclass(frozen=True, eq=False)
class Corpus:
    """Sequences on disk. Make one with `Corpus.open`.

    seq_lens: int32 [N], tokens. first_trained: int32 [N], index (1 or more) of the first token that
    is trained as a target. num_trained: int32 [N], trained tokens at index 1 or more. All three are
    memory-mapped. source_ids: int32 [N] domain of each sequence, or None. vocab_size: ids the
    tokenizer knows. info: corpus.json whole.
    """

    path: Path
    hash: str
    seq_lens: np.ndarray
    first_trained: np.ndarray
    num_trained: np.ndarray
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
                raise _damaged(folder, f"{name} is missing")
            if file.stat().st_size != size:
                raise _damaged(folder, f"{name} has {file.stat().st_size} bytes, not {size}")
            if (verify or size <= _HASHED_AT_OPEN) and file_hash(file) != digest:
                raise _damaged(folder, f"{name} does not match its hash")
        try:
            tokens = IndexedFiles.open(folder / "tokens")
            mask = IndexedFiles.open(folder / "mask")
            arrays = {
                name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
                for name in _ARRAYS
            }
        except (OSError, ValueError, EOFError) as error:
            raise _damaged(folder, str(error)) from None
        if {len(tokens.lengths), len(mask.lengths), *map(len, arrays.values())} != {info["rows"]}:
            raise _damaged(folder, "its files differ in the number of sequences")
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

    def tokens(self, index: int, length: int | None = None) -> np.ndarray:
        """uint16 or int32 [length]: the first `length` tokens (default all), a read-only view."""
        return self._tokens[index][:length]

    def mask(self, index: int, length: int | None = None) -> np.ndarray:
        """uint8 [length]: 1 where the token is trained, a read-only view."""
        return self._mask[index][:length]


class CorpusWriter:
    """Writes the files of a corpus into a folder that nobody reads yet (see `staged_folder`).

    vocab_size: number of ids; token ids must be below it. end_id: the end token's id, or -1.
    """

    def __init__(self, folder: Path, *, vocab_size: int, end_id: int) -> None:
        if not -1 <= end_id < vocab_size:
            raise ValueError(f"end id {end_id} is not below the vocabulary size {vocab_size}")
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_id = end_id
        dtype = np.uint16 if vocab_size < _UINT16_LIMIT else np.int32
        self._tokens = IndexedWriter(folder / "tokens", np.dtype(dtype))
        self._mask = IndexedWriter(folder / "mask", np.dtype(np.uint8))
        self._first_trained = array("i")
        self._num_trained = array("i")
        self._max_token_id = 0

    def __len__(self) -> int:
        return len(self._first_trained)

    @property
    def seq_lens(self) -> np.ndarray:
        """int32 [N]: lengths of the sequences added so far."""
        return np.array(self._tokens.lengths, dtype=np.int32)

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._tokens.abandon()
        self._mask.abandon()

    def add(self, tokens: np.ndarray, mask: np.ndarray) -> None:
        """Appends one sequence. tokens: integers [n]; mask: 0 or 1 [n].

        ValueError when the shapes differ, an id is out of range or nothing is trained.
        """
        where = f"sequence {len(self)}"
        if tokens.ndim != 1 or tokens.shape != mask.shape:
            raise ValueError(f"{where}: tokens {tokens.shape} and mask {mask.shape} do not match")
        trained = np.flatnonzero(mask[1:]) + 1
        if len(trained) == 0:
            raise ValueError(
                f"{where} has no trained token (the first token is never a target); leave it out"
            )
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ValueError(
                f"{where} has token ids from {tokens.min()} to {tokens.max()}; they must be from 0 "
                f"to {self._vocab_size - 1}"
            )
        self._tokens.add(tokens)
        self._mask.add(mask != 0)
        self._first_trained.append(int(trained[0]))
        self._num_trained.append(len(trained))
        self._max_token_id = max(self._max_token_id, int(tokens.max()))

    def finish(self, info: dict[str, Any]) -> dict[str, Any]:
        """Writes the index files, the arrays and corpus.json; returns the latter.

        info: further entries of corpus.json (where the data came from). ValueError when no sequence
        was added.
        """
        if len(self) == 0:
            raise ValueError("no sequence with a trained token; a corpus needs at least one")
        self._tokens.finish()
        self._mask.finish()
        files = self._tokens.digests | self._mask.digests
        columns = (self._tokens.lengths, self._first_trained, self._num_trained)
        for name, column in zip(_ARRAYS, columns, strict=True):
            file = self._folder / f"{name}.npy"
            np.save(file, np.frombuffer(column, dtype=np.int32).astype("<i4"), allow_pickle=False)
            files[file.name] = (file.stat().st_size, file_hash(file))
        document = {
            **info,
            "format_version": FORMAT_VERSION,
            "rows": len(self),
            "tokens": int(np.frombuffer(self._tokens.lengths, np.int32).sum(dtype=np.int64)),
            "trained_tokens": int(np.frombuffer(self._num_trained, np.int32).sum(dtype=np.int64)),
            "vocab_size": self._vocab_size,
            "max_token_id": self._max_token_id,
            "end_id": self._end_id,
            "files": {name: list(files[name]) for name in _FILES},
        }
        document["hash"] = _content_hash(document)
        document["document_hash"] = _document_hash(document)
        text = json.dumps(document, indent=2, sort_keys=True) + "\n"
        (self._folder / DOCUMENT).write_text(text, encoding="utf-8")
        return document


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
        for tokens, mask in sequences:
            writer.add(np.asarray(tokens), np.asarray(mask))
        writer.finish(info or {})
    return Corpus.open(target)


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
        try:
            folder.rename(target)
        except OSError:
            if not target.exists():
                raise
            if _hash_or_none(target) != read_document(folder)["hash"]:
                raise exists_error(target) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_document(folder: Path) -> dict[str, Any]:
    """corpus.json, checked against its own hash. ValueError when missing, foreign or edited."""
    try:
        document = json.loads((folder / DOCUMENT).read_text(encoding="utf-8"))
        version = document["format_version"]
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder} holds no {DOCUMENT}; make the corpus with `hbp prepare --output {folder}`"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"{DOCUMENT}: {error}") from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"the corpus in {folder} has format version {version}, this release reads "
            f"{FORMAT_VERSION}; make it again with `hbp prepare`"
        )
    if document.get("document_hash") != _document_hash(document):
        raise _damaged(folder, f"{DOCUMENT} was edited")
    return document


def exists_error(target: Path) -> ValueError:
    """The error for an output that is taken by something else."""
    return ValueError(
        f"{target} exists and is not this corpus (other inputs, or damaged); name another folder "
        "or remove it"
    )


def _content_hash(document: dict[str, Any]) -> str:
    """Of what training sees; not of paths or of how the corpus was made."""
    names = ("format_version", "vocab_size", "end_id", "files")
    return _json_hash({name: document[name] for name in names})


def _document_hash(document: dict[str, Any]) -> str:
    return _json_hash({key: value for key, value in document.items() if key != "document_hash"})


def _json_hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_or_none(folder: Path) -> str | None:
    try:
        return Corpus.open(folder).hash
    except ValueError:
        return None


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"the corpus in {folder} is damaged ({what}); remove it and make it again with "
        "`hbp prepare`"
    )
