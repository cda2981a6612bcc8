"""Which micro-batches share a step: steps that look like the corpus, or that a pipeline likes.

Guarantees (asserted by tests/unit/test_mixing.py):
- every micro-batch given is in exactly one step;
- with one_level every step has one level;
- with `alike` steps cost less time, by the 1F1B model of metrics.pipeline_stretch, the more mixing
  max_mixing allows.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_hbp import _C
from megatron_hbp.metrics import LENGTH_BINS
from megatron_hbp.randomness import mix_seed

# Sources beyond this many are one class: those with the fewest tokens.
_MOST_SOURCE_CLASSES = 64
# Without a bound on mixing: the share of the time that steps may cost more to be like the corpus
# instead of wholly unlike it.
_PRICE_OF_MIXING = 0.2
# With a bound, the prices that the search is over, and how often it halves the last step between.
_FINER_PRICES = 3
_PRICES = tuple(2.0**power for power in range(-8, 9))


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

    bubble: how many times the slowest micro-batch a step adds to its time, (stages - 1) / virtual
    stages. one_level: each step has one level. alike: time counts, at the least price that keeps
    the mixing ratio within max_mixing (0: at a fixed, low price). Otherwise every step is made to
    look like the whole of `part`. Raises ValueError when no grouping found keeps the bound.
    """
    if num_microbatches == 1 or len(part) == 0:
        return part.reshape(-1, num_microbatches)
    deviations = kinds.deviations(part)
    levels = kinds.levels[part]
    pools = [np.arange(len(part))]
    if one_level:
        pools = [np.flatnonzero(levels == level) for level in np.unique(levels)]

    def grouped(peaks: np.ndarray | None) -> np.ndarray:
        steps = [
            pool[
                _C.mixed_steps(
                    deviations[pool],
                    num_microbatches,
                    mix_seed(seed, turn),
                    None if peaks is None else peaks[pool],
                )
            ]
            for turn, pool in enumerate(pools)
        ]
        return np.concatenate(steps).reshape(-1, num_microbatches)

    times = kinds.times[part]
    total_time = math.fsum(times.tolist())  # the same on every machine
    if not alike or not times.any():
        return part[grouped(None)]

    @cache
    def at_price(price: float) -> np.ndarray:
        # a step's cost is its deviation in tokens; all of them together are at most twice `tokens`
        tokens = int(kinds.tokens()[part].sum())
        peaks = np.rint(2.0 * tokens / price * bubble / total_time * times)
        return grouped(peaks.astype(np.int64))

    def distance_of(steps: np.ndarray) -> int:
        by_length = deviations[steps].sum(axis=1)[:, : kinds.num_length_classes]
        return int(np.abs(by_length).sum())

    if max_mixing == 0:
        return part[at_price(_PRICE_OF_MIXING)]
    random = _random_distance(kinds, len(part) // num_microbatches)

    def keeps_bound(price: float) -> bool:
        return distance_of(at_price(price)) <= max_mixing * random

    index = bisect_left(_PRICES, True, key=keeps_bound)
    if index == len(_PRICES):
        mixed = grouped(None)
        if distance_of(mixed) > max_mixing * random:
            raise ValueError(
                f"max_mixing is {max_mixing}, but the best steps of these micro-batches have a "
                f"mixing ratio of about {distance_of(mixed) / random:.2f}; use that or more, or 0 "
                "for no bound"
            )
        return part[mixed]
    price, cheaper = _PRICES[index], _PRICES[max(index - 1, 0)]
    for _ in range(_FINER_PRICES):
        between = math.sqrt(price * cheaper)
        price, cheaper = (between, cheaper) if keeps_bound(between) else (price, between)
    return part[at_price(price)]


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
