"""corpus.json: written, read and checked against its own hash."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

FORMAT_VERSION = 2
DOCUMENT = "corpus.json"
ARRAYS = ("seq_lens", "first_trained", "num_trained", "row_numbers")
FILES = ("tokens.bin", "tokens.idx", "mask.bin", "mask.idx", *(f"{n}.npy" for n in ARRAYS))
_NOT_TRAINED = ("row_numbers.npy",)  # where sequences came from, not what they are


def write_document(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Adds the version and the hashes to corpus.json's content, writes it and returns it whole."""
    document = {**content, "format_version": FORMAT_VERSION}
    document["hash"] = _content_hash(document)
    document["document_hash"] = _document_hash(document)
    text = json.dumps(document, indent=2, sort_keys=True) + "\n"
    with (folder / DOCUMENT).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return document


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
        raise damaged_error(folder, f"{DOCUMENT}: {error}") from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"the corpus in {folder} has format version {version}, this release reads "
            f"{FORMAT_VERSION}; make it again with `hbp prepare`"
        )
    if document.get("document_hash") != _document_hash(document):
        raise damaged_error(folder, f"{DOCUMENT} was edited")
    return document


def exists_error(target: Path, why: str = "other inputs, or damaged") -> ValueError:
    """The error for an output that is taken by something else."""
    return ValueError(
        f"{target} exists and is not this corpus ({why}); name another folder or remove it"
    )


def damaged_error(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"the corpus in {folder} is damaged ({what}); remove it and make it again with "
        "`hbp prepare`"
    )


def _content_hash(document: dict[str, Any]) -> str:
    """Of what training sees; not of paths or of how the corpus was made."""
    files = {name: entry for name, entry in document["files"].items() if name not in _NOT_TRAINED}
    names = ("format_version", "vocab_size", "end_id")
    return _json_hash({name: document[name] for name in names} | {"files": files})


def _document_hash(document: dict[str, Any]) -> str:
    return _json_hash({key: value for key, value in document.items() if key != "document_hash"})


def _json_hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
