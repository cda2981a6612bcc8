"""The steps of one epoch: micro-batches, curriculum, order.

Guarantees (asserted by tests/unit/test_schedule.py and tests/unit/test_planner.py):
- every micro-batch is in exactly one step;
- steps do not come in order of length or level: any run of steps holds all kinds of them, and all
  levels are exhausted together;
- no step consists of fillers only;
- with pipeline stages, micro-batches of a step rise in time and fall again.
Which micro-batches share a step is decided in mixing.py.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hbp import _C
from megatron_hbp.balance import neighbours, replica_order, whole_units
from megatron_hbp.cost import ATTENTION, DENSE_8B_H100, PackCost
from megatron_hbp.metrics import LENGTH_BINS
from megatron_hbp.mixing import MicrobatchKinds, group_into_steps
from megatron_hbp.packing import LevelPacks, offsets_of, pack_levels
from megatron_hbp.randomness import mix_seed, permutation, random_words


@dataclass(frozen=True)
class Shape:
    """The settings that an epoch needs. pack_lens, cp_sizes, multiples: int64 [levels].

    num_microbatches: of a step; None for one step of as many as it takes. one_level: a step holds
    one level only. alike: its micro-batches take about the same time, for pipelines. max_mixing: 0,
    or the mixing ratio that `alike` may not exceed. cost: what balances packs and predicts times
    (None: attention, and the times of a dense 8B model). source_of: int32 [sequences] or None, with
    num_sources sources.
    """

    pack_lens: np.ndarray
    cp_sizes: np.ndarray
    multiples: np.ndarray
    num_ranks: int
    num_microbatches: int | None
    num_stages: int
    num_virtual_stages: int
    one_level: bool
    alike: bool
    max_mixing: float
    cost: PackCost | None
    source_of: np.ndarray | None
    num_sources: int

    def limits(self) -> np.ndarray:
        """int64 [levels]: the longest sequence of each level."""
        return self.pack_lens // self.multiples * self.multiples

    def longest(self) -> int:
        """The longest sequence of any level."""
        return int(self.limits().max())

    def replicas(self) -> np.ndarray:
        """int64 [levels]: packs of a micro-batch."""
        return self.num_ranks // self.cp_sizes


@dataclass(frozen=True)
class Epoch:
    """sequence_ids: in training order. pack_counts: int64 [packs]. levels: int64 [microbatches]."""

    sequence_ids: np.ndarray
    pack_counts: np.ndarray
    levels: np.ndarray


def plan_epoch(
    seq_lens: np.ndarray,
    shape: Shape,
    *,
    packer: str,
    curriculum_steps: int,
    seed: int,
    chosen: np.ndarray | None = None,
) -> tuple[Epoch, int]:
    """One epoch, and how many of curriculum_steps it begins with: all, or as many as it can.

    seq_lens: int32|int64 [n], kept tokens, 0 for a dropped sequence. chosen: the ids of the epoch,
    repeats allowed (None: each kept sequence once).
    """
    packs = whole_packs(seq_lens, shape, packer=packer, seed=seed, chosen=chosen)
    order, levels, early = _training_order(packs, shape, curriculum_steps, mix_seed(seed, 2))
    counts = packs.sums[0, order]
    first = np.empty(len(order), dtype=np.int64)
    first[order] = offsets_of(counts)[:-1]
    items, pack_of = packs.items, packs.pack_of
    del packs, order  # memory is tightest in the next line
    return Epoch(_C.gather(items, pack_of, first), counts, levels), early


def _training_order(
    packs: LevelPacks, shape: Shape, curriculum_steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Packs, micro-batch by micro-batch and replica by replica; levels of the micro-batches; early.

    early: how many of curriculum_steps there are at the start.
    """
    counts, tokens, squares = packs.sums
    costs = (shape.cost or ATTENTION).per_rank(
        counts, tokens, squares, shape.cp_sizes[packs.levels]
    )
    order = neighbours(costs, packs.levels)
    kinds, starts = _microbatches(packs, order, shape)
    early = 0
    if shape.num_microbatches is None:
        steps = np.argsort(-kinds.times, kind="stable")[None]
    else:
        num_cp1 = int(np.count_nonzero(shape.cp_sizes[kinds.levels] == 1))
        early = min(curriculum_steps, num_cp1 // shape.num_microbatches)
        steps = _steps(kinds, shape, shape.num_microbatches, early, seed)
        if shape.num_stages > 1:
            steps = up_and_down(steps, kinds.times)
    microbatches = steps.ravel()
    replicas = shape.replicas()[kinds.levels[microbatches]]
    new_starts = offsets_of(replicas)
    shift = np.repeat(starts[microbatches] - new_starts[:-1], replicas)
    order = order[np.arange(len(order)) + shift]
    balanced = replica_order(costs[order], new_starts, steps.shape[1], shape.num_ranks)
    return order[balanced], kinds.levels[microbatches], early


def whole_packs(
    seq_lens: np.ndarray, shape: Shape, *, packer: str, seed: int, chosen: np.ndarray | None
) -> LevelPacks:
    """Packs of one epoch in whole micro-batches, or in whole steps where a step has one level."""
    together = shape.num_microbatches or 1
    units = shape.replicas() * (together if shape.one_level else 1)
    packs = pack_levels(
        seq_lens,
        pack_lens=shape.pack_lens,
        multiples=shape.multiples,
        units=units,
        packer=packer,
        seed=mix_seed(seed, 1),
        chosen=chosen,
    )
    return whole_units(
        packs,
        pack_lens=shape.pack_lens,
        multiples=shape.multiples,
        replicas=shape.replicas(),
        microbatches_together=together,
        one_level=shape.one_level,
        cost=shape.cost or ATTENTION,
    )


def _microbatches(
    packs: LevelPacks, order: np.ndarray, shape: Shape
) -> tuple[MicrobatchKinds, np.ndarray]:
    """Cuts packs, sorted by level and cost, into micro-batches; where in `order` each starts."""
    replicas = shape.replicas()
    num_packs = np.bincount(packs.levels, minlength=len(replicas))
    levels = np.repeat(np.arange(len(replicas)), num_packs // replicas)
    starts = offsets_of(replicas[levels])
    group_of = np.empty(len(order), dtype=np.int32)
    group_of[order] = np.repeat(np.arange(len(levels)), replicas[levels])
    class_tokens = _C.class_tokens(
        packs.items,
        packs.pack_of,
        group_of,
        len(levels),
        np.array(LENGTH_BINS, dtype=np.int64),
        shape.source_of,
        shape.num_sources,
    )
    counts, tokens, squares = packs.sums[:, order]
    times = (shape.cost or DENSE_8B_H100).per_rank(
        counts, tokens, squares, shape.cp_sizes[packs.levels[order]]
    )
    kinds = MicrobatchKinds(
        levels=levels,
        class_tokens=class_tokens,
        num_length_classes=len(LENGTH_BINS) + 1,
        num_sequences=np.add.reduceat(counts, starts[:-1]),
        times=np.maximum.reduceat(times, starts[:-1]),
        lens=packs.items["length"],
    )
    return kinds, starts[:-1]


def _steps(
    kinds: MicrobatchKinds, shape: Shape, num_microbatches: int, early_steps: int, seed: int
) -> np.ndarray:
    """int64 [steps, num_microbatches]: which micro-batches share a step, in training order.

    early_steps: how many steps at the start hold CP 1 levels only, as many as there can be or less.
    """
    everything = np.arange(len(kinds.levels))
    early = _evenly(
        np.flatnonzero(shape.cp_sizes[kinds.levels] == 1), early_steps * num_microbatches
    )
    late = np.delete(everything, early)
    parts = []
    for turn, part in enumerate((early, late)):
        steps = group_into_steps(
            kinds,
            part,
            num_microbatches=num_microbatches,
            bubble=(shape.num_stages - 1) / shape.num_virtual_stages,
            one_level=shape.one_level,
            alike=shape.alike,
            max_mixing=shape.max_mixing,
            seed=mix_seed(seed, turn),
        )
        parts.append(steps[_mixed(kinds, steps, mix_seed(seed, turn, 1))])
    return np.concatenate(parts)


def up_and_down(steps: np.ndarray, times: np.ndarray) -> np.ndarray:
    """int64 [steps, num_microbatches]: each step's micro-batches from short to long and back.

    In a pipeline every turn waits for the longest of as many neighbours as there are stages, so
    unlike ones side by side stall nearly all turns. times: float64, of each micro-batch.
    """
    ascending = np.take_along_axis(steps, np.argsort(times[steps], axis=1, kind="stable"), axis=1)
    return np.concatenate([ascending[:, ::2], ascending[:, 1::2][:, ::-1]], axis=1)


def deal(num_items: int, num_hands: int, seed: int) -> np.ndarray:
    """int64 [num_items]: the hand that each item of a sorted row is dealt to.

    Every num_hands neighbours go to different hands, at random, so that each hand holds the whole
    range evenly. What does not go round comes from the middle of the row.
    """
    if num_hands == 0:
        return np.empty(0, dtype=np.int64)
    num_rounds, num_rest = divmod(num_items, num_hands)
    words = random_words(seed, (num_rounds + 1) * num_hands).reshape(num_rounds + 1, num_hands)
    rounds = np.argsort(words, axis=1, kind="stable")
    low, high = rounds[: num_rounds // 2], rounds[num_rounds // 2 + 1 :]
    return np.concatenate([low.ravel(), rounds[num_rounds // 2, :num_rest], high.ravel()])


def _mixed(kinds: MicrobatchKinds, steps: np.ndarray, seed: int) -> np.ndarray:
    """int64 [steps]: the steps in an order in which any run of about sqrt(steps) holds all kinds.

    A step's kind is its levels, then its mean sequence length.
    """
    tokens = kinds.tokens()[steps].sum(axis=1)
    mean_len = tokens / kinds.num_sequences[steps].sum(axis=1)
    by_kind = np.lexsort((mean_len, kinds.levels[steps].sum(axis=1)))
    turn = deal(len(steps), max(1, round(len(steps) ** 0.5)), seed)
    return by_kind[np.lexsort((permutation(mix_seed(seed), len(steps)), turn))]


def _evenly(items: np.ndarray, num: int) -> np.ndarray:
    """`num` of the items, evenly spaced."""
    return items[np.arange(num) * len(items) // max(num, 1)]
