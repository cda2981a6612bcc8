"""The steps of one epoch: levels in a step, curriculum, order.

Guarantees (asserted by tests/unit/test_planner.py):
- every micro-batch is in exactly one step;
- steps do not come in order of length or level: any run of steps holds all kinds of them, and all
  levels are exhausted together;
- no step consists of fillers only.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hbp.balance import attention_costs, neighbours, replica_order, whole_units
from megatron_hbp.packing import Packs, offsets_of, pack_levels


@dataclass(frozen=True)
class Shape:
    """The settings that an epoch needs. pack_lens, cp_sizes, multiples: int64 [levels].

    one_level: a step holds one level only. alike: its micro-batches are neighbours by cost, for
    pipelines.
    """

    pack_lens: np.ndarray
    cp_sizes: np.ndarray
    multiples: np.ndarray
    num_ranks: int
    num_microbatches: int
    one_level: bool
    alike: bool

    def limits(self) -> np.ndarray:
        """int64 [levels]: the longest sequence of each level."""
        return self.pack_lens // self.multiples * self.multiples

    def longest(self) -> int:
        """The longest sequence of any level."""
        return int(self.limits().max())


@dataclass(frozen=True)
class Epoch:
    """packs: in training order. levels: int64 [micro-batches]."""

    packs: Packs
    levels: np.ndarray


def plan_epoch(
    lens: np.ndarray, shape: Shape, packer: str, curriculum_steps: int, rng: np.random.Generator
) -> tuple[Epoch, int]:
    """One epoch, and how many of curriculum_steps it begins with: all, or as many as it can.

    lens: int64 [n], kept tokens, 0 for a dropped sequence.
    """
    limits = np.maximum.accumulate(shape.limits())
    groups = np.where(lens > 0, np.searchsorted(limits, lens), -1)
    packs = pack_levels(
        lens,
        groups,
        pack_lens=shape.pack_lens,
        cp_sizes=shape.cp_sizes,
        multiples=shape.multiples,
        packer=packer,
        rng=rng,
    )
    replicas = shape.num_ranks // shape.cp_sizes
    packs = whole_units(
        packs,
        lens,
        pack_lens=shape.pack_lens,
        multiples=shape.multiples,
        units=replicas * (shape.num_microbatches if shape.one_level else 1),
        units_together=1 if shape.one_level else shape.num_microbatches,
    )
    packs = [neighbours(level_packs, lens) for level_packs in packs]
    num_packs = np.array([len(level_packs) for level_packs in packs])
    levels = np.repeat(np.arange(len(packs)), num_packs // replicas)
    together = packs[0]
    for level_packs in packs[1:]:
        together = together.joined(level_packs)
    starts = offsets_of(replicas[levels])  # the first pack of each micro-batch
    tokens = np.add.reduceat(together.sums(lens), starts[:-1])
    is_cp1 = shape.cp_sizes == 1
    # a level has whole steps when a step holds one level, so this count is right for both modes
    most_early = int(np.count_nonzero(is_cp1[levels])) // shape.num_microbatches
    early = min(curriculum_steps, most_early)
    steps = steps_of_epoch(
        levels,
        tokens,
        np.diff(together.offsets[starts]),
        is_cp1=is_cp1,
        shape=shape,
        curriculum_steps=early,
        rng=rng,
    )
    order = _pack_order(steps, starts, attention_costs(together, lens), shape, levels)
    return Epoch(together.select(order), levels[steps.ravel()]), early


def steps_of_epoch(
    levels: np.ndarray,
    tokens: np.ndarray,
    num_sequences: np.ndarray,
    *,
    is_cp1: np.ndarray,
    shape: Shape,
    curriculum_steps: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Orders the micro-batches of one epoch into steps.

    levels: int [T], level of each micro-batch, ascending; inside a level by ascending cost.
    tokens, num_sequences: int64 [T], what each holds. is_cp1: bool [levels].
    curriculum_steps: how many steps at the start hold CP 1 levels only, as many as there can be or
    fewer. Returns int64 [T / num_microbatches, num_microbatches].
    """
    if shape.one_level:
        steps = np.concatenate(
            [
                _into_steps(np.flatnonzero(levels == level), shape, rng)
                for level in np.unique(levels)
            ]
        )
        early = _evenly(np.flatnonzero(is_cp1[levels[steps[:, 0]]]), curriculum_steps)
        parts = [steps[early], np.delete(steps, early, axis=0)]
    else:
        cp1 = np.flatnonzero(is_cp1[levels])
        early = _evenly(cp1, curriculum_steps * shape.num_microbatches)
        late = np.setdiff1d(np.arange(len(levels)), early)
        parts = [_into_steps(part, shape, rng) for part in (early, late)]
    return np.concatenate([_mixed(part, levels, tokens, num_sequences, rng) for part in parts])


def deal(num_items: int, num_hands: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [num_items]: the hand that each item of a sorted row is dealt to.

    Every num_hands neighbours go to different hands, at random, so that each hand holds the whole
    range evenly. What does not go round comes from the middle of the row.
    """
    if num_hands == 0:
        return np.empty(0, dtype=np.int64)
    num_rounds, num_rest = divmod(num_items, num_hands)
    rounds = rng.permuted(np.tile(np.arange(num_hands), (num_rounds + 1, 1)), axis=1)
    low, high = rounds[: num_rounds // 2], rounds[num_rounds // 2 + 1 :]
    return np.concatenate([low.ravel(), rounds[num_rounds // 2, :num_rest], high.ravel()])


def _into_steps(microbatches: np.ndarray, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """int64 [steps, num_microbatches]: neighbours if alike, else each holds the whole range."""
    num_steps = len(microbatches) // shape.num_microbatches
    if not (shape.one_level and shape.alike):
        step = deal(len(microbatches), num_steps, rng)
        microbatches = microbatches[np.argsort(step, kind="stable")]
    return microbatches.reshape(num_steps, shape.num_microbatches)


def _mixed(
    steps: np.ndarray,
    levels: np.ndarray,
    tokens: np.ndarray,
    num_sequences: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Shuffles steps so that any run of about sqrt(steps) of them holds all kinds.

    A step's kind is its lowest level, then its mean sequence length.
    """
    mean_len = tokens[steps].sum(axis=1) / num_sequences[steps].sum(axis=1)
    by_kind = steps[np.lexsort((mean_len, levels[steps].min(axis=1)))]
    turn = deal(len(steps), max(1, round(len(steps) ** 0.5)), rng)
    return by_kind[np.lexsort((rng.random(len(steps)), turn))]


def _evenly(items: np.ndarray, num: int) -> np.ndarray:
    """`num` of the items, evenly spaced."""
    return items[np.arange(num) * len(items) // max(num, 1)]


def _pack_order(
    steps: np.ndarray, starts: np.ndarray, costs: np.ndarray, shape: Shape, levels: np.ndarray
) -> np.ndarray:
    """int64 [packs]: the packs in training order, replica by replica inside each micro-batch."""
    order = []
    for step in steps:
        rank_costs = np.zeros(shape.num_ranks)
        for microbatch in step:
            first, end = starts[microbatch], starts[microbatch + 1]
            rank_cost = costs[first:end] / shape.cp_sizes[levels[microbatch]]
            order.append(first + replica_order(rank_cost, rank_costs))
    return np.concatenate(order)
