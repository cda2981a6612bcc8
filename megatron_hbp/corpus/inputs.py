"""Finds the input files: from files, folders, glob patterns and folders that `datasets` saved.

Guarantees:
- files come in the order given, those of a folder or pattern sorted by path, those of a `datasets`
  folder in its own order;
- a file is taken by its content first, then by the end of its name;
- no file comes twice, by whatever path it was given;
- an input that cannot be used, or that would be left out although it holds rows, is a ValueError.

Taken are JSON lines (.jsonl, .ndjson, .json), one JSON array of rows (.json), each also gzipped,
Parquet and Arrow (.arrow, .feather; stream or file).
"""

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")
_SUFFIXES = (*_LINES_SUFFIXES, ".parquet", ".arrow", ".feather")
_GZIP = b"\x1f\x8b"
_PARQUET = b"PAR1"
_ARROW_FILE = b"ARROW1"
_ARROW_STREAM = b"\xff\xff\xff\xff"
_BOM = b"\xef\xbb\xbf"
_OTHER_CONTENT = {
    b"\x28\xb5\x2f\xfd": "zstd-compressed; unpack it with `zstd -d`",
    b"BZh": "bzip2-compressed; unpack it with `bunzip2`",
    b"\xfd7zXZ\x00": "xz-compressed; unpack it with `unxz`",
    b"PK\x03\x04": "a zip archive; unpack it with `unzip`",
    b"FEA1": "Feather version 1; write it as Parquet",
    b"\xff\xfe": "UTF-16; write it as UTF-8",
    b"\xfe\xff": "UTF-16; write it as UTF-8",
    b"version https://git-lfs": "a pointer of Git LFS, not the data; fetch it with `git lfs pull`",
}
_PACKED_SUFFIXES = (".zst", ".bz2", ".xz", ".zip", ".lz4")
_STATE = "state.json"
_SPLITS = "dataset_dict.json"
# what `datasets` and the hub keep beside the rows
_NOT_ROWS = (_STATE, _SPLITS, "dataset_info.json", "dataset_infos.json")
_KNOWN = "give .jsonl, .json, .ndjson (also gzipped), .parquet, .arrow or .feather files"
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class InputFile:
    """A file of rows. kind: "jsonl" (a row per line), "json" (one array of rows), "parquet" or
    "arrow". compressed: gzipped. size: bytes on disk."""

    path: Path
    kind: str
    compressed: bool
    size: int


def find_inputs(given: Sequence[str | Path]) -> list[InputFile]:
    """The files of rows that files, folders and patterns stand for, in order. Raises ValueError."""
    files: list[InputFile] = []
    seen: dict[tuple[int, int], Path] = {}
    for item in given:
        for path in _expand(str(item)):
            file = _examine(path)
            status = path.stat()
            other = seen.setdefault((status.st_dev, status.st_ino), path)
            if other is not path:
                also = f", also as {other}" if other != path else ""
                raise ValueError(
                    f"input {path} is given twice{also}; give each file once (weights repeat rows)"
                )
            files.append(file)
    if not files:
        raise ValueError(f"no input; {_KNOWN}")
    return files


def _expand(item: str) -> Iterator[Path]:
    if not item:  # maybe a variable of a script that is not set; never the folder at hand
        raise ValueError("an input is empty text; give local files, folders or patterns")
    path = Path(item)
    if path.is_dir():
        yield from _in_folder(path)
    elif path.exists():
        yield path
    elif glob.has_magic(item):
        yield from _matching(item)
    elif os.path.lexists(path):
        raise ValueError(f"input {path} is a link to nothing; {_KNOWN}")
    else:
        raise ValueError(f"input {path} does not exist; give local files, folders or patterns")


def _matching(pattern: str) -> list[Path]:
    found = sorted(map(Path, glob.glob(pattern, recursive=True)))
    if not found:
        raise ValueError(f"input {pattern} matches no file; {_KNOWN}")
    files: dict[Path, None] = {}  # with **, a pattern matches a folder and the files in it as well
    saved: dict[Path, list[str] | None] = {}
    for path in found:
        if path.is_dir():
            files |= dict.fromkeys(_below(path))
            continue
        folder = path.parent
        if folder not in saved:
            saved[folder] = _data_files(folder) if (folder / _STATE).is_file() else None
        names = saved[folder]
        # beside its data, a folder of `datasets` holds what was computed from it
        if names is None or path.name in names:
            files |= dict.fromkeys(_known([path]))
    if not files:
        raise ValueError(f"input {pattern} matches no file of rows but {_listed(found)}; {_KNOWN}")
    return list(files)


def _in_folder(folder: Path) -> list[Path]:
    files = list(_below(folder))
    if not files:
        raise ValueError(
            f"input {folder} holds no file of rows but {_listed(_entries(folder))}; {_KNOWN}"
        )
    return files


def _below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The files of rows in a folder and its sub-folders, sorted by path, hidden ones left out."""
    if folder.resolve() in above:
        return  # a link back up
    if (folder / _SPLITS).is_file():
        raise _names_splits(folder)
    if (folder / _STATE).is_file():
        names = _data_files(folder)
        if names is not None:
            yield from (folder / name for name in names)
            return
    for path in _entries(folder):
        if path.is_dir():
            yield from _below(path, (*above, folder.resolve()))
        else:
            yield from _known([path])


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise _unreadable(folder, error) from None


def _known(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        name = path.name.lower()
        if name in _NOT_ROWS:
            continue
        inner = name.removesuffix(".gz")
        if inner.endswith(_SUFFIXES):
            yield path
        packed = next((end for end in _PACKED_SUFFIXES if name.endswith(end)), None)
        if packed and name.removesuffix(packed).endswith(_SUFFIXES):
            raise ValueError(
                f"input {path} is packed in a way that is not read ({packed}); unpack it, or name "
                "the files to be read"
            )


def _data_files(folder: Path) -> list[str] | None:
    """The data files of a folder that `datasets` saved; None for another folder's state.json."""
    state = _json_object(folder / _STATE)
    entries = state.get("_data_files")
    if not isinstance(entries, list):
        return None
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(
            f"input {folder} keeps the order of its rows in an indices mapping, as old releases of "
            "`datasets` did; load it with load_from_disk and save it again with a current release"
        )
    names = [str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
    if not names:
        raise ValueError(f"input {folder} is a saved data set without rows; leave it out")
    for name in names:
        if Path(name).name != name:
            raise ValueError(
                f"input {folder} is a saved data set that names a file outside of it, {name}; "
                "name the files to be read"
            )
        if not (folder / name).is_file():
            raise ValueError(
                f"input {folder} is a saved data set whose file {name} is missing; save it again"
            )
    return names


def _names_splits(folder: Path) -> ValueError:
    splits = _json_object(folder / _SPLITS).get("splits")
    names = [str(name) for name in splits] if isinstance(splits, list) else []
    example = f", e.g. {folder / names[0]}" if names else ""
    return ValueError(
        f"input {folder} is a saved data set of the splits {', '.join(names) or 'none'}; "
        f"name one of them{example}"
    )


def _json_object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _examine(path: Path) -> InputFile:
    if not path.is_file():
        raise ValueError(f"input {path} is not a regular file; {_KNOWN}")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        compressed = head.startswith(_GZIP)
        if compressed:
            head = _gzip_head(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    if not head:
        raise ValueError(f"input {path} is empty; give files with at least one row")
    return InputFile(path, _kind(path, head, compressed), compressed, size)


def _gzip_head(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            return file.read1(_HEAD_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"input {path} is a damaged gzip file ({error}); copy it again") from None


def _kind(path: Path, head: bytes, compressed: bool) -> str:
    name = path.name.lower()
    inner = name.removesuffix(".gz") if name.endswith(".gz") else name
    for start, what in _OTHER_CONTENT.items():
        if head.startswith(start):
            raise ValueError(f"input {path} is {what}")
    binary = _binary_kind(head, inner)
    if binary is not None and compressed:
        raise ValueError(f"input {path} is a gzipped {binary} file; unpack it with `gunzip`")
    if binary is not None:
        return binary
    suffix = Path(inner).suffix
    if suffix == ".parquet":
        raise ValueError(f"input {path} does not start as Parquet files do; write it again")
    if suffix in (".arrow", ".feather"):
        raise ValueError(f"input {path} does not start as Arrow files do; write it again")
    text = head.removeprefix(_BOM).lstrip(b" \t\r\n")
    if suffix not in _LINES_SUFFIXES and (suffix or not text.startswith((b"{", b"["))):
        raise ValueError(f"input {path} is not a kind of file that is read; {_KNOWN}")
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if text.startswith(b"["):
        return "json"
    if text.split(b"\n", 1)[0].strip() == b"{":
        raise ValueError(
            f"input {path} is one object over several lines; write one row per line, or an array "
            "of rows"
        )
    return "jsonl"


def _binary_kind(head: bytes, name: str) -> str | None:
    if head.startswith(_PARQUET):
        return "parquet"
    if head.startswith((_ARROW_FILE, _ARROW_STREAM)):
        return "arrow"
    # streams of Arrow before 0.15 start with the length of their schema
    old_stream = name.endswith(".arrow") and b"\x00" in head[:4]
    return "arrow" if old_stream else None


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"input {path} cannot be read ({error.strerror or error}); see to its rights")


def _listed(paths: Sequence[Path], limit: int = 8) -> str:
    names = [path.name + "/" * path.is_dir() for path in paths]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "nothing"
