"""Micro-batches into steps, steps into an order: levels in a step, curriculum, mixing.

Guarantees (asserted by tests/unit/test_planner.py):
- every micro-batch is in exactly one step;
- steps do not come in order of length or level: any run of steps holds all kinds of them, and all
  levels are exhausted together;
- no step consists of fillers only, as long as fewer than a step's micro-batches do.
"""

import numpy as np


def steps_of_epoch(
    levels: np.ndarray,
    mean_lens: np.ndarray,
    *,
    is_cp1: np.ndarray,
    num_microbatches: int,
    one_level: bool,
    alike: bool,
    curriculum_steps: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Orders the micro-batches of one epoch into steps.

    levels: int [T], level of each micro-batch, ascending; inside a level by ascending cost.
    mean_lens: float64 [T], mean sequence length of each. is_cp1: bool [levels].
    one_level: a step holds one level only; then each level has a multiple of num_microbatches.
    alike: a step of one level holds neighbours, for pipelines; else steps are as mixed as can be.
    curriculum_steps: how many steps at the start hold CP 1 levels only, at most most_cp1_steps().
    Returns int64 [T / num_microbatches, num_microbatches].
    """
    if one_level:
        steps = np.concatenate(
            [
                _into_steps(np.flatnonzero(levels == level), num_microbatches, alike, rng)
                for level in np.unique(levels)
            ]
        )
        early = _evenly(np.flatnonzero(is_cp1[levels[steps[:, 0]]]), curriculum_steps)
        parts = [steps[early], np.delete(steps, early, axis=0)]
    else:
        cp1 = np.flatnonzero(is_cp1[levels])
        early = _evenly(cp1, curriculum_steps * num_microbatches)
        late = np.setdiff1d(np.arange(len(levels)), early)
        parts = [_into_steps(part, num_microbatches, False, rng) for part in (early, late)]
    return np.concatenate([_mixed(steps, levels, mean_lens, rng) for steps in parts])


def most_cp1_steps(levels: np.ndarray, is_cp1: np.ndarray, num_microbatches: int) -> int:
    """The largest possible curriculum_steps of an epoch, see steps_of_epoch()."""
    return int(np.count_nonzero(is_cp1[levels])) // num_microbatches


def deal(num_items: int, num_hands: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [num_items]: the hand that each item of a sorted row is dealt to.

    Every num_hands neighbours go to different hands, at random, so that each hand holds the whole
    range evenly.
    """
    num_rounds = -(-num_items // max(num_hands, 1))
    hands = np.tile(np.arange(num_hands), (num_rounds, 1))
    return rng.permuted(hands, axis=1).ravel()[:num_items]


def _into_steps(
    microbatches: np.ndarray, num_microbatches: int, alike: bool, rng: np.random.Generator
) -> np.ndarray:
    """int64 [steps, num_microbatches]: neighbours if alike, else each step the whole range."""
    if alike:
        return microbatches.reshape(-1, num_microbatches)
    step = deal(len(microbatches), len(microbatches) // num_microbatches, rng)
    return microbatches[np.argsort(step, kind="stable")].reshape(-1, num_microbatches)


def _mixed(
    steps: np.ndarray, levels: np.ndarray, mean_lens: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Shuffles steps so that any run of about sqrt(steps) of them holds all kinds."""
    by_kind = steps[np.lexsort((mean_lens[steps].mean(axis=1), levels[steps].sum(axis=1)))]
    turn = deal(len(steps), max(1, round(len(steps) ** 0.5)), rng)
    return by_kind[np.lexsort((rng.random(len(steps)), turn))]


def _evenly(items: np.ndarray, num: int) -> np.ndarray:
    """`num` of the items, evenly spaced."""
    return items[np.arange(num) * len(items) // max(num, 1)]
