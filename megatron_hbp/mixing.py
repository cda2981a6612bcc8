"""Which micro-batches share a step: steps that look like the corpus, or that a pipeline likes.

Guarantees (asserted by tests/unit/test_mixing.py):
- every micro-batch given is in exactly one step;
- with one_level every step has one level;
- with `alike` and max_mixing the answer is the fastest of the groupings looked at that keep the
  bound, by the 1F1B model of metrics.pipeline_stretch, else the best mixed one.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_hbp import _C
from megatron_hbp.metrics import LENGTH_BINS
from megatron_hbp.randomness import mix_seed

# How much longer the last micro-batch of a band may take than the first, tried from left to right.
_WIDTHS = (0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, np.inf)
# Sources beyond this many are one class: those with the fewest tokens.
_MOST_SOURCE_CLASSES = 64
# Without a bound on mixing: how much longer than the fastest grouping the chosen one may take.
_TIME_TOLERANCE = 0.01


@dataclass(frozen=True)
class MicrobatchKinds:
    """What is known of each micro-batch of an epoch.

    levels: int64 [micro-batches]. class_tokens: int64 [micro-batches, classes], tokens by length
    class (the first num_length_classes columns) and by source. num_sequences: int64. times:
    float64, of the slowest rank, any unit. lens: int32 [sequences], the lengths of the epoch.
    """

    levels: np.ndarray
    class_tokens: np.ndarray
    num_length_classes: int
    num_sequences: np.ndarray
    times: np.ndarray
    lens: np.ndarray

    def tokens(self) -> np.ndarray:
        """int64 [micro-batches]."""
        return self.class_tokens[:, : self.num_length_classes].sum(axis=1)

    def deviations(self, part: np.ndarray) -> np.ndarray:
        """int64 [part, classes]: tokens above what the mixture of `part` would give each."""
        tokens = self.tokens()[part]
        here = self.class_tokens[part]
        shares = here.sum(axis=0) / max(int(tokens.sum()), 1)
        return here - np.rint(tokens[:, None] * shares).astype(np.int64)


def group_into_steps(
    kinds: MicrobatchKinds,
    part: np.ndarray,
    *,
    num_microbatches: int,
    bubble: float,
    one_level: bool,
    alike: bool,
    max_mixing: float,
    seed: int,
) -> np.ndarray:
    """int64 [steps, num_microbatches]: the micro-batches of `part`, grouped.

    bubble: how many times the slowest micro-batch a step adds, (stages - 1) / virtual stages.
    one_level: each step has one level. alike: its micro-batches take about the same time, as much
    as max_mixing (0: as long as it costs at most 1 % of the time) lets them. Otherwise every step
    is made to look like the whole of `part`.
    """
    deviations = kinds.deviations(part)
    levels = kinds.levels[part]
    pools = (
        [np.flatnonzero(levels == level) for level in np.unique(levels)]
        if one_level
        else [np.arange(len(part))]
    )
    times = kinds.times[part]

    def grouped(width: float) -> np.ndarray:
        steps = [np.empty((0, num_microbatches), dtype=np.int64)]
        for pool in pools:
            for band in _bands(pool, times, width, num_microbatches):
                mixed = _C.mixed_steps(
                    deviations[band], num_microbatches, mix_seed(seed, len(steps))
                )
                steps.append(band[mixed].reshape(-1, num_microbatches))
        return np.concatenate(steps)

    if num_microbatches == 1 or len(part) == 0:
        return part.reshape(-1, num_microbatches)
    if not alike:
        return part[grouped(np.inf)]

    def time_of(steps: np.ndarray) -> float:
        return float(times[steps].sum() + bubble * times[steps].max(axis=1).sum())

    def distance_of(steps: np.ndarray) -> float:
        by_length = deviations[steps].sum(axis=1)[:, : kinds.num_length_classes]
        return float(np.abs(by_length).sum())

    at = cache(lambda index: grouped(_WIDTHS[index]))
    widths = range(len(_WIDTHS) - 1)
    if max_mixing > 0:
        most = max_mixing * _random_distance(kinds, len(part) // num_microbatches)
        index = bisect_left(widths, True, key=lambda i: distance_of(at(i)) <= most)
    else:
        longest = time_of(at(0)) * (1 + _TIME_TOLERANCE)
        index = bisect_left(widths, True, key=lambda i: time_of(at(i + 1)) > longest)
    return part[at(index)]


def _bands(
    pool: np.ndarray, times: np.ndarray, width: float, num_microbatches: int
) -> Iterator[np.ndarray]:
    """Cuts micro-batches, by ascending time, into bands of whole steps.

    A band ends where the time passes that of its first one by the share `width`.
    """
    pool = pool[np.argsort(times[pool], kind="stable")]
    ascending = times[pool]
    first = 0
    while first < len(pool):
        end = int(np.searchsorted(ascending, ascending[first] * (1 + width), side="right"))
        num_steps = max(1, (end - first) // num_microbatches)
        yield pool[first : first + num_steps * num_microbatches]
        first += num_steps * num_microbatches


def _random_distance(kinds: MicrobatchKinds, num_steps: int) -> float:
    """Tokens by which random steps are expected to differ from the mixture, summed over classes.

    The share of a class in a step of T tokens drawn at random is about normal with the variance of
    a ratio estimate: ((1 - p)^2 p m + p^2 sum of the others' p m) / T, p being a class' share of
    the tokens and m its mean length weighted by tokens.
    """
    lens = kinds.lens.astype(np.float64)
    classes = np.searchsorted(np.array(LENGTH_BINS), kinds.lens)
    tokens = np.bincount(classes, weights=lens, minlength=kinds.num_length_classes)
    squares = np.bincount(classes, weights=lens * lens, minlength=kinds.num_length_classes)
    total = tokens.sum()
    shares, spread = tokens / total, squares / total  # spread: p m
    variances = (1 - shares) ** 2 * spread + shares**2 * (spread.sum() - spread)
    return float(num_steps * np.sqrt(2 / np.pi * variances * total / num_steps).sum())


def source_classes(
    seq_lens: np.ndarray, source_ids: np.ndarray | None
) -> tuple[np.ndarray | None, int]:
    """int32 [n] classes to mix by and how many: the largest sources, the others as one."""
    if source_ids is None or len(source_ids) == 0:
        return None, 0
    names, classes = np.unique(source_ids, return_inverse=True)
    if len(names) > _MOST_SOURCE_CLASSES:
        tokens = np.bincount(classes, weights=seq_lens)
        rank = np.empty(len(names), dtype=np.int64)
        rank[np.argsort(-tokens, kind="stable")] = np.arange(len(names))
        classes = np.minimum(rank, _MOST_SOURCE_CLASSES - 1)[classes]
    return classes.astype(np.int32), min(len(names), _MOST_SOURCE_CLASSES)
