"""How often an epoch takes each sequence, from the weight of its source.

Guarantees (asserted by tests/unit/test_weights.py):
- over epochs 0 .. e a sequence of weight w is taken floor or ceil of (e + 1) x w times;
- an integer weight takes every sequence that often in every epoch;
- the answer depends on the seed, the epoch and the sequence's place only.
"""

from collections.abc import Sequence

import numpy as np

from megatron_hbp.randomness import mix_seed, random_words

_PURPOSE = 0x5EED  # keeps these words apart from those that shuffle epochs


def repeats(
    seq_lens: np.ndarray, source_ids: np.ndarray, weights: Sequence[float], seed: int, epoch: int
) -> np.ndarray:
    """int64 [n]: how often `epoch` takes each sequence.

    seq_lens: int32|int64 [n], 0 for a dropped sequence. source_ids: int [n], index into weights.
    Each sequence starts at a random place between two integers and moves on by its weight in every
    epoch; it is taken as often as it passes an integer.
    """
    start = random_words(mix_seed(seed, _PURPOSE), len(seq_lens)) / 2.0**64
    weight = np.where(seq_lens > 0, np.asarray(weights, dtype=np.float64)[source_ids], 0.0)
    passed = np.floor((epoch + 1) * weight + start) - np.floor(epoch * weight + start)
    return passed.astype(np.int64)


def epoch_ids(
    seq_lens: np.ndarray, source_ids: np.ndarray, weights: Sequence[float], seed: int, epoch: int
) -> np.ndarray:
    """The ids of an epoch, ascending, each as often as it is taken: int32, int64 from 2**31 on.

    Raises ValueError when the epoch would take none.
    """
    times = repeats(seq_lens, source_ids, weights, seed, epoch)
    ids = np.repeat(np.arange(len(seq_lens)), times)
    if len(ids) == 0:
        raise ValueError(
            f"epoch {epoch} takes no sequence with source_weights {tuple(weights)}; use larger ones"
        )
    return ids.astype(np.int32 if len(seq_lens) < 2**31 else np.int64)
