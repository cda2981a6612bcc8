"""Slow and obvious versions of the kernels: the same packs, found by looking at every pack."""

import numpy as np


def best_fit(seq_lens, visit, capacity):
    """Each sequence into the fullest pack that holds it; of equals the one that changed last."""
    packs, spaces, changed = [], [], []
    for turn, sequence in enumerate(visit):
        length = int(seq_lens[sequence])
        fitting = [p for p in range(len(packs)) if spaces[p] >= length]
        if fitting:
            pack = min(fitting, key=lambda p: (spaces[p], -changed[p]))
        else:
            pack = len(packs)
            packs.append([])
            spaces.append(capacity)
            changed.append(turn)
        packs[pack].append(int(sequence))
        spaces[pack] -= length
        changed[pack] = turn
    return _arrays(packs)


def first_fit(seq_lens, visit, capacity):
    """Each sequence into the pack that was opened first among those that hold it."""
    packs, spaces = [], []
    for sequence in visit:
        length = int(seq_lens[sequence])
        pack = next((p for p in range(len(packs)) if spaces[p] >= length), len(packs))
        if pack == len(packs):
            packs.append([])
            spaces.append(capacity)
        packs[pack].append(int(sequence))
        spaces[pack] -= length
    return _arrays(packs)


def next_fit(seq_lens, visit, capacity):
    """Each sequence into the last pack, or into a new one when it does not fit."""
    packs, space = [], 0
    for sequence in visit:
        length = int(seq_lens[sequence])
        if not packs or length > space:
            packs.append([])
            space = capacity
        packs[-1].append(int(sequence))
        space -= length
    return _arrays(packs)


def _arrays(packs):
    order = np.array([i for pack in packs for i in pack], dtype=np.int64)
    offsets = np.cumsum([0, *(len(pack) for pack in packs)]).astype(np.int64)
    return order, offsets
