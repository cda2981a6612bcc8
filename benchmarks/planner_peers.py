"""Other packers: those of the `bench` extra, and Rust ones where they are installed.

A peer is given its best input type; what converts to it and from its result is not timed.
"""

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

# Seconds for tulu at 1M sequences by pack length, with as few packs as first-fit decreasing:
# measured earlier on a shared 2-core machine, in one session with lightbinpack.
EARLIER = {
    "lightbinpack, its fastest": {32768: 0.163, 131072: 0.164},
    "seqpacker obfd": {32768: 0.156, 131072: 0.179},
    "seqpacker obfdp": {32768: 0.170, 131072: 0.143},
    "seq-len-balance ffd": {32768: 16.1, 131072: 5.4},
}
EARLIER_YARDSTICK = "lightbinpack, its fastest"
# Of these the first sequences only, once: they are slow.
NUM_SLOW = 5000

_PACKAGES = ("lightbinpack", "binpacking", "seq-len-balance", "seqpacker")
_RUST = ("seq-len-balance", "seqpacker")


@dataclass(frozen=True)
class Peer:
    """convert: lengths (int64) to the peer's input. run: input and capacity to packs.

    count: packs in what run returns. slow: only fit for a few thousand sequences.
    """

    name: str
    convert: Callable[[np.ndarray], Any]
    run: Callable[[Any, int], Any]
    count: Callable[[Any], int] = len
    slow: bool = False


def peers() -> list[Peer]:
    """Every peer that can be imported."""
    found = []
    if (module := _import("lightbinpack")) is not None:
        found += [
            Peer(f"lightbinpack {name}", np.ndarray.tolist, getattr(module, name))
            for name in ("obfd", "obfdp", "bfd", "ffd")
        ]
    if (module := _import("seqpacker")) is not None:
        pack = module.pack_sequences
        found += [
            Peer(
                f"seqpacker {name}",
                np.ascontiguousarray,
                lambda lens, cap, name=name: pack(lens, capacity=cap, strategy=name),
                lambda result: len(result.bins),
            )
            for name in ("obfd", "obfdp")
        ]
    if (module := _import("seq_len_balance")) is not None:
        found.append(Peer("seq-len-balance ffd", np.ndarray.tolist, module.ffd, slow=True))
    if (module := _import("binpacking")) is not None:
        # a dictionary keeps the index of each sequence, as the other peers do
        found.append(
            Peer("binpacking", _enumerated, module.to_constant_volume, slow=True),
        )
    return found


def versions() -> dict[str, str]:
    """Version by package, "" for one that is not installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def absent() -> dict[str, str]:
    """Reason by package that is not installed."""
    return {
        name: "a Rust source whose build fetches from crates.io: install it where that works"
        if name in _RUST
        else "pip install -e '.[bench]' installs it"
        for name, version in versions().items()
        if not version
    }


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _enumerated(lens: np.ndarray) -> dict[int, int]:
    return dict(enumerate(lens.tolist()))
