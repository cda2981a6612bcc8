"""The folder of a plan: plan.json beside little-endian .npy arrays.

Guarantees (asserted by tests/unit/test_plan.py):
- a folder appears complete or not at all; another writer of the same plan is harmless;
- nothing is read with pickle.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp.arrays import load_array


def save_folder(
    target: Path,
    document: dict[str, Any],
    arrays: Mapping[str, np.ndarray | None],
    metrics: Callable[[], dict[str, Any]],
) -> None:
    """Writes plan.json (document, with `metrics`) and an .npy file for each array that there is.

    The same plan already there is left alone, by its "hash". Raises ValueError when `target` is
    anything else.
    """
    if target.exists():
        if _saved_hash(target) == document["hash"]:
            return
        raise ValueError(f"{target} exists and is not this plan; name another folder or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for name, array in arrays.items():
            if array is not None:
                np.save(scratch / f"{name}.npy", little_endian(array), allow_pickle=False)
        text = json.dumps(document | {"metrics": metrics()}, indent=2, sort_keys=True)
        (scratch / "plan.json").write_text(text + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if _saved_hash(target) != document["hash"]:  # another writer of the same plan
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load_document(folder: Path, format_version: int) -> dict[str, Any]:
    """The content of plan.json. Raises ValueError when it is missing, foreign or damaged."""
    try:
        document = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        raise ValueError(
            f"{folder} holds no plan.json; make the plan with `hbp plan --output {folder}`"
        ) from None
    except ValueError as error:
        raise ValueError(f"{folder}/plan.json is damaged ({error}); make it again") from None
    version = document.get("format_version")
    if version != format_version:
        raise ValueError(
            f"{folder}/plan.json has format version {version}, this release reads "
            f"{format_version}; make the plan again"
        )
    return document


def load_arrays(folder: Path, names: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    """The arrays, memory-mapped; an optional one only where its file is there."""
    return {
        name: load_array(folder / f"{name}.npy")
        for name in names
        if name not in optional or (folder / f"{name}.npy").exists()
    }


def little_endian(array: np.ndarray) -> np.ndarray:
    """The array with little-endian numbers, without a copy where it has them."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _saved_hash(folder: Path) -> str | None:
    try:
        return json.loads((folder / "plan.json").read_text(encoding="utf-8")).get("hash")
    except (OSError, ValueError, AttributeError):
        return None
