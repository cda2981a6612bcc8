"""What one level costs as it is trained today: packs in random order, so that ranks wait.

Guarantees (asserted by tests/unit/test_epoch_time.py):
- the same histogram gives the same number: the sample is drawn with a fixed seed;
- up to _SAMPLE sequences nothing is sampled: all are packed once.
"""

import numpy as np

from megatron_hbp.epoch_time import LevelTime
from megatron_hbp.histogram import LengthHistogram
from megatron_hbp.placement import runs

_SAMPLE = 200_000


def waiting_seconds(
    histogram: LengthHistogram, time: LevelTime, num_microbatches: int, together: int
) -> float:
    """Seconds that all ranks wait for the slowest one, in num_microbatches.

    together: micro-batches after which ranks wait for each other. Sequences are laid out in random
    order, a new pack whenever the next does not fit; what the packs hold differs. The level must
    hold the longest sequence.
    """
    rng = np.random.Generator(np.random.PCG64(0))
    if histogram.num_sequences <= _SAMPLE:
        lens = rng.permutation(np.repeat(histogram.lengths, histogram.counts))
    else:
        ends = np.cumsum(histogram.counts)
        places = rng.integers(0, ends[-1], _SAMPLE)
        lens = histogram.lengths[np.searchsorted(ends, places, side="right")]
    offsets = runs(lens, time.level.pack_len)[:-1]
    sums = np.stack(
        [
            np.add.reduceat(values, offsets).astype(np.float64)
            for values in (np.ones_like(lens), lens, lens * lens)
        ]
    )
    added = time.per.sum(axis=0) @ sums
    packs_together = time.num_replicas * together
    whole = -(-len(added) // packs_together) * packs_together
    loads = np.zeros(whole)
    loads[: len(added)] = added
    loads = loads.reshape(-1, together, time.num_replicas).sum(axis=1)
    waited = loads.max(axis=1) - loads.mean(axis=1)
    return float(waited.mean()) / together * num_microbatches
