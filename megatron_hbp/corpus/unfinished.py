"""The folder in which a corpus is made, and from which an interrupted making goes on.

Guarantees:
- what is saved says what was on the disk before: a checkpoint never runs ahead of its files;
- work on other inputs, or with another recipe, is thrown away, never mixed in; so is work whose
  checkpoint was damaged;
- whoever opens it last owns it: an earlier owner that still lives finds its files gone, and can
  neither write into those of the new one nor publish them.
It is used by one process at a time: see claim.py, also for when there may be two after all.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHECKPOINT = "progress.json"
_WORK = "work."


class UnfinishedFolder:
    """.NAME.preparing beside `target`. origin: what the work must be of, as JSON values."""

    def __init__(self, target: Path, origin: dict[str, Any]) -> None:
        self.root = target.with_name(f".{target.name}.preparing")
        self._origin = json.loads(json.dumps(origin))
        # a name of our own, so that nobody else has it
        self.work = self.root / f"{_WORK}{uuid.uuid4().hex}"
        self.corpus = self.work / "corpus"

    def open(self, report: Callable[[str], None]) -> dict[str, Any] | None:
        """Makes the folder; returns the last checkpoint, or None to start from nothing.

        report: takes a line for the user when something is thrown away.
        """
        checkpoint = self.root / _CHECKPOINT
        found = list(self.root.glob(f"{_WORK}*"))
        if checkpoint.exists():
            try:
                document = json.loads(checkpoint.read_text(encoding="utf-8"))
                digest = document.pop("hash")
                whole = digest == _hash(document) and len(found) == 1
            except (ValueError, KeyError, TypeError, AttributeError):
                document, whole = {}, False
            if whole and document["origin"] == self._origin:
                found[0].rename(self.work)
                return document["state"]
            what = "of other inputs or with other options" if whole else "damaged"
            report(f"the unfinished work in {self.root} is {what}; starts anew")
        return self.start_anew()

    def start_anew(self) -> None:
        """Throws away what is there and makes an empty folder."""
        self.remove()
        self.corpus.mkdir(parents=True)

    def save(self, state: dict[str, Any]) -> None:
        """Saves a checkpoint: JSON values."""
        document = {"origin": self._origin, "state": state}
        scratch = self.root / f"{_CHECKPOINT}.new"
        with scratch.open("w", encoding="utf-8") as file:
            json.dump(document | {"hash": _hash(document)}, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self.root / _CHECKPOINT)

    def has_checkpoint(self) -> bool:
        """Whether there is work that a later making can go on with."""
        return (self.root / _CHECKPOINT).exists()

    def remove(self) -> None:
        """Removes the folder and everything in it."""
        shutil.rmtree(self.root, ignore_errors=True)


def _hash(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
