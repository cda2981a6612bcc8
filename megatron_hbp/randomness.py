"""Everything random in a plan: splitmix64, the same numbers on every machine and in every version.

Guarantees (asserted by tests/unit/test_randomness.py):
- the same seed gives the same words as csrc/random.h;
- seeds made of different keys are unrelated.
"""

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix_seed(*keys: int) -> int:
    """One seed, 0 .. 2**64 - 1, of several keys of 0 or more."""
    seed = 0
    for key in keys:
        for shift in range(0, max(1, key.bit_length()), 64):
            seed = _mix(((seed ^ (key >> shift & _MASK)) + _GOLDEN) & _MASK)
    return seed


def random_words(seed: int, num: int) -> np.ndarray:
    """uint64 [num]: the first words of splitmix64 with this seed."""
    state = np.uint64(seed) + np.arange(1, num + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def permutation(seed: int, num: int) -> np.ndarray:
    """int64 [num]: 0 .. num - 1 in random order."""
    return np.argsort(random_words(seed, num), kind="stable")


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
