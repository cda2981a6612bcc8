"""A profile: measured times of micro-batches, as one JSON file (docs/profile.md).

Guarantees (asserted by tests/unit/test_profile.py):
- load(save(profile)) is equal; the file appears whole or not at all;
- a file of another format version, with a wrong type, an impossible number or a level twice at the
  same lengths is refused with its place.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_hbp.level import Level
from megatron_hbp.run_layout import RunLayout

FORMAT_VERSION = 1
# Seconds, tokens, squares and bytes above this are measured nowhere.
_MOST = 1e30


@dataclass(frozen=True)
class Point:
    """One measured micro-batch.

    seconds: forward and backward, of the slowest rank and stage. sequences, tokens, squares: of one
    pack, the sum of squared lengths last; None where not known. memory_bytes: most that was
    allocated on a GPU, context included. Raises ValueError for an impossible value.
    """

    level: Level
    seconds: float
    tokens: int | None = None
    squares: float | None = None
    sequences: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        where = f"point of level {self.level}"
        for name in ("seconds", "tokens", "squares", "sequences", "memory_bytes"):
            value = getattr(self, name)
            if value is None and name != "seconds":
                continue
            whole = name not in ("seconds", "squares")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"{where}: {name} is {value!r}; give a number")
            if not 0 < value < _MOST:
                raise ValueError(f"{where}: {name} is {value!r}; give a finite number above 0")
        if (self.tokens is None) != (self.squares is None):
            raise ValueError(f"{where}: tokens and squares belong together; give both or neither")
        if self.tokens is None or self.squares is None:
            return
        if self.tokens > self.level.pack_len:
            raise ValueError(
                f"{where}: {self.tokens} tokens do not fit in its pack of {self.level.pack_len}"
            )
        count = self.sequences or self.tokens
        least, most = self.tokens**2 / count, self.tokens**2
        if not least * (1 - 1e-9) <= self.squares <= most * (1 + 1e-9):
            raise ValueError(
                f"{where}: squares is {self.squares!r}, but the squared lengths of {self.tokens} "
                f"tokens in {self.sequences or 'any number of'} sequences add up to {least:g} .. "
                f"{most:g}"
            )


@dataclass(frozen=True)
class Profile:
    """Points measured for a model (name or file, see find_model) on a device (see find_device)."""

    model: str
    device: str
    layout: RunLayout
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        for name in ("model", "device"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"profile: {name} is {getattr(self, name)!r}; give it a text")
        if not self.points:
            raise ValueError("profile: no points; measure at least one level")
        seen: set[tuple] = set()
        for point in self.points:
            key = (point.level, point.tokens, point.squares)
            if key in seen:
                raise ValueError(
                    f"profile: level {point.level} is there twice with the same lengths; keep one "
                    "point, the mean of its repeats"
                )
            seen.add(key)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the file, whole or not at all."""
        points = [
            {"level": str(point.level)}
            | {
                field.name: getattr(point, field.name)
                for field in fields(Point)
                if field.name != "level" and getattr(point, field.name) is not None
            }
            for point in self.points
        ]
        document = {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "device": self.device,
            "layout": asdict(self.layout),
            "points": points,
        }
        path = Path(path)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Profile":
        """Reads a file. Raises ValueError when it is missing, foreign or damaged."""
        path = Path(path)
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"there is no profile {path}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"profile {path} cannot be read: {error}") from None
        try:
            return _profile(document)
        except ValueError as error:
            raise ValueError(f"profile {path}: {error}") from None


def check_profile_matches(profile: Profile, *, model: str, device: str, layout: RunLayout) -> None:
    """Raises ValueError when the profile was measured for another model, device or layout.

    The number of ranks and of micro-batches may differ: neither changes a micro-batch.
    """
    for name, wanted in (("model", model), ("device", device)):
        found = getattr(profile, name)
        if found.strip().lower() != wanted.strip().lower():
            raise ValueError(
                f"the profile was measured for {name} {found!r}, not {wanted!r}; name that {name}, "
                "or measure anew"
            )
    for field in fields(RunLayout):
        if field.name in ("num_ranks", "num_microbatches", "distributed_optimizer"):
            continue
        found, wanted = getattr(profile.layout, field.name), getattr(layout, field.name)
        if found != wanted:
            raise ValueError(
                f"the profile was measured with {field.name} {found}, not {wanted}; use that, or "
                "measure anew"
            )


def _profile(document: Any) -> Profile:
    if not isinstance(document, dict):
        raise ValueError("the file holds no object; see docs/profile.md")
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"format version {version!r} is not {FORMAT_VERSION}; measure anew with this release"
        )
    _keys(document, "the file", {"format_version", "model", "device", "layout", "points"}, set())
    layout: Any = document["layout"]
    if isinstance(layout, dict) and isinstance(layout.get("chunk_layers"), list):
        layout = {**layout, "chunk_layers": tuple(layout["chunk_layers"])}  # JSON has no tuples
    names = {field.name for field in fields(RunLayout)}
    _keys(layout, "layout", {"num_ranks"}, names - {"num_ranks"})
    if not isinstance(document["points"], list):
        raise ValueError("points is not a list")
    points = []
    optional = {field.name for field in fields(Point)} - {"level", "seconds"}
    for number, entry in enumerate(document["points"], start=1):
        _keys(entry, f"point {number}", {"level", "seconds"}, optional)
        if not isinstance(entry["level"], str):
            raise ValueError(f"point {number}: level is {entry['level']!r}; give PACK_LEN:CP[:R]")
        try:
            points.append(Point(**(entry | {"level": Level.parse(entry["level"])})))
        except ValueError as error:
            raise ValueError(f"point {number}: {error}") from None
    return Profile(document["model"], document["device"], RunLayout(**layout), tuple(points))


def _keys(entry: Any, where: str, wanted: set[str], optional: set[str]) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not an object")
    missing, unknown = wanted - set(entry), set(entry) - wanted - optional
    if missing or unknown:
        parts = [f"{name} is missing" for name in sorted(missing)]
        parts += [f"{name} is unknown" for name in sorted(unknown)]
        raise ValueError(f"{where}: {', '.join(parts)}; see docs/profile.md")
