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
    histogram: LengthHistogram, time: LevelTime, num_microbatches: int, lockstep: bool
) -> tuple[float, float]:
    """Seconds of a step in which ranks wait for the slowest one, and those by which the longest of
    its micro-batches is above their mean.

    num_microbatches: of a step. lockstep: ranks wait after every micro-batch, else after the step.
    Sequences are laid out in random order, a new pack whenever the next does not fit. The level
    must hold the longest sequence.
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
    packs_of_step = time.num_replicas * num_microbatches
    loads = np.zeros(-(-len(added) // packs_of_step) * packs_of_step)
    loads[: len(added)] = added
    loads = loads.reshape(-1, num_microbatches, time.num_replicas)
    slowest = loads.max(axis=2)
    above = slowest.max(axis=1) - slowest.mean(axis=1)
    if lockstep:
        waited = (slowest - loads.mean(axis=2)).sum(axis=1)
    else:
        of_step = loads.sum(axis=1)
        waited = of_step.max(axis=1) - of_step.mean(axis=1)
    return float(waited.mean()), float(above.mean())
