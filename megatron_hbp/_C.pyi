"""Types of the compiled kernels; csrc/*.h say what they do.

Items are arrays of ITEM32 or ITEM64, records of `id` and `length`; packs are numbered in the type
of the ids. Arrays are never converted: another dtype is a TypeError, a wrong value a ValueError.
"""

import numpy as np

ITEM32: np.dtype
ITEM64: np.dtype

def survey(seq_lens: np.ndarray) -> tuple[int, int, int]: ...
def shuffled_by_level(
    seq_lens: np.ndarray, limits: np.ndarray, seed: int, chosen: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]: ...
def shuffled_by_level_wide(
    seq_lens: np.ndarray, limits: np.ndarray, seed: int, chosen: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]: ...
def sort_descending(items: np.ndarray, seed: int) -> None: ...
def best_fit(
    items: np.ndarray,
    capacity: int,
    multiple: int = 1,
    in_streams: bool = False,
    out: np.ndarray | None = None,
) -> tuple[np.ndarray, int]: ...
def first_fit(
    items: np.ndarray, capacity: int, multiple: int = 1, out: np.ndarray | None = None
) -> tuple[np.ndarray, int]: ...
def next_fit(
    items: np.ndarray, capacity: int, multiple: int = 1, out: np.ndarray | None = None
) -> tuple[np.ndarray, int]: ...
def iterative_sampling(
    items: np.ndarray,
    capacity: int,
    multiple: int,
    threshold: int,
    iterations: int,
    seed: int,
    out: np.ndarray | None = None,
) -> tuple[np.ndarray, int]: ...
def look_ahead(
    items: np.ndarray, capacity: int, multiple: int, seed: int, out: np.ndarray | None = None
) -> tuple[np.ndarray, int]: ...
def greedy_fill(
    items: np.ndarray, multiple: int, spaces: np.ndarray, first_pack: int, pack_of: np.ndarray
) -> int: ...
def empty_packs(items: np.ndarray) -> np.ndarray: ...
def group(
    items: np.ndarray, pack_of: np.ndarray, num_packs: int
) -> tuple[np.ndarray, np.ndarray]: ...
def gather(items: np.ndarray, pack_of: np.ndarray, starts: np.ndarray) -> np.ndarray: ...
def sum_packs(items: np.ndarray, pack_of: np.ndarray, num_packs: int) -> np.ndarray: ...
def spread_packs(
    items: np.ndarray,
    pack_of: np.ndarray,
    capacity: int,
    multiple: int,
    chosen: np.ndarray,
    num_new: int,
    num_packs: int,
) -> np.ndarray: ...
def class_tokens(
    items: np.ndarray,
    pack_of: np.ndarray,
    group_of: np.ndarray,
    num_groups: int,
    bins: np.ndarray,
    source_of: np.ndarray | None = None,
    num_sources: int = 0,
) -> np.ndarray: ...
def replica_order(
    costs: np.ndarray, starts: np.ndarray, per_step: int, num_ranks: int
) -> np.ndarray: ...
def mixed_steps(
    deviations: np.ndarray, per_step: int, seed: int, peaks: np.ndarray | None = None
) -> np.ndarray: ...
def pack_layout(
    bounds: np.ndarray, lengths: np.ndarray, low: int, size: int
) -> tuple[np.ndarray, np.ndarray]: ...
def pack_tokens(
    bounds: np.ndarray,
    lengths: np.ndarray,
    low: int,
    size: int,
    corpus: np.ndarray,
    starts: np.ndarray,
    tokens: list[np.ndarray],
    masks: list[np.ndarray],
) -> np.ndarray: ...
def pack_targets(
    bounds: np.ndarray,
    lengths: np.ndarray,
    low: int,
    size: int,
    corpus: np.ndarray,
    starts: np.ndarray,
    tokens: list[np.ndarray],
    masks: list[np.ndarray],
    weights: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, int]: ...
