"""Sample lengths like those of the HBP paper's 8B job, as its tables imply them.

939,344 short samples (Tulu3: mean about 750 tokens, at most 32K) and 1,920 long ones (LongCite:
uniform over 8K to 128K), arXiv 2503.07680. The long ones are what makes 17 % of the tokens lie in
samples over 16K, the paper's communication ratio. The real data is not needed, and not used.
"""

import numpy as np

NUM_SAMPLES = 941_264
NUM_LONG = 1_920
SHORTEST, LONGEST_SHORT = 8, 32_768
SHORTEST_LONG, LONGEST = 8_192, 131_072

_MEDIAN, _SIGMA = 375.0, 1.17  # of the log-normal lengths of short samples
_SEED, _STREAM = 20260101, 2


def paper_lengths(num_samples: int = NUM_SAMPLES) -> np.ndarray:
    """int64 [num_samples], tokens, shuffled; the same number gives the same lengths.

    Fewer samples keep the mixture: one long sample for 489 short ones, and at least one. Raises
    ValueError for fewer than two.
    """
    if num_samples < 2:
        raise ValueError(
            f"num_samples is {num_samples}; it must be at least 2: a short, a long one"
        )
    rng = np.random.default_rng([_SEED, 0 if num_samples == NUM_SAMPLES else num_samples, _STREAM])
    num_long = max(1, round(num_samples * NUM_LONG / NUM_SAMPLES))
    short = _short_lengths(rng, num_samples - num_long)
    long = rng.integers(SHORTEST_LONG, LONGEST, num_long, endpoint=True)
    lengths = np.concatenate([short, long])
    rng.shuffle(lengths)
    return lengths


def _short_lengths(rng: np.random.Generator, num: int) -> np.ndarray:
    """int64 [num]: log-normal, those out of range drawn anew."""
    kept: list[np.ndarray] = []
    missing = num
    while missing > 0:
        drawn = rng.lognormal(np.log(_MEDIAN), _SIGMA, missing * 13 // 10 + 64)
        inside = drawn[(drawn >= SHORTEST) & (drawn <= LONGEST_SHORT)][:missing]
        kept.append(np.rint(inside).astype(np.int64))
        missing -= len(inside)
    return np.concatenate(kept)
