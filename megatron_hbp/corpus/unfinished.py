"""The folder in which a corpus is made, and from which an interrupted making goes on.

Guarantees:
- what is saved says what was on the disk before: a checkpoint never runs ahead of its files;
- work on other inputs, or with another recipe, is thrown away, never mixed in.
It is used by one process at a time: see claim.py.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

_CHECKPOINT = "progress.json"


class UnfinishedFolder:
    """.NAME.preparing beside `target`. origin: what the work must be of, as JSON values."""

    def __init__(self, target: Path, origin: dict[str, Any]) -> None:
        self._root = target.with_name(f".{target.name}.preparing")
        self._origin = json.loads(json.dumps(origin))
        self.corpus = self._root / "corpus"

    def open(self) -> dict[str, Any] | None:
        """Makes the folder; returns the last checkpoint, or None to start from nothing."""
        try:
            document = json.loads((self._root / _CHECKPOINT).read_text(encoding="utf-8"))
            if document["origin"] == self._origin and self.corpus.is_dir():
                return document["state"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        self.remove()
        self.corpus.mkdir(parents=True)
        return None

    def save(self, state: dict[str, Any]) -> None:
        """Saves a checkpoint: JSON values."""
        scratch = self._root / f"{_CHECKPOINT}.new"
        with scratch.open("w", encoding="utf-8") as file:
            json.dump({"origin": self._origin, "state": state}, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self._root / _CHECKPOINT)

    def remove(self) -> None:
        """Removes the folder and everything in it."""
        shutil.rmtree(self._root, ignore_errors=True)
