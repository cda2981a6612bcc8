"""Prediction: what an epoch takes with some levels, in seconds by cause, steps and shares.

Guarantees (asserted by tests/unit/test_epoch_time.py):
- its terms add up to its seconds;
- it is close to the simulation of a real plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hbp.cost_model import CostModel
from megatron_hbp.epoch_time import TERMS, Epoch, EpochTimes, LevelTime
from megatron_hbp.histogram import LengthHistogram
from megatron_hbp.level import Level, check_levels


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What an epoch takes with some levels.

    levels: ascending. seconds: of the epoch; terms: the same by cause (epoch_time.TERMS).
    num_steps: of the epoch. microbatches, own_packs: of each level, its micro-batches and the packs
    that its own sequences need. padding: the share of the trained slots without a token.
    communication_ratio: the share of tokens in packs with CP above 1. tokens_per_step: slots.
    """

    levels: tuple[Level, ...]
    seconds: float
    terms: dict[str, float]
    num_steps: int
    microbatches: tuple[int, ...]
    own_packs: tuple[int, ...]
    padding: float
    communication_ratio: float
    tokens_per_step: int
    num_ranks: int
    num_devices: int

    @property
    def whole_packs(self) -> tuple[int, ...]:
        """Packs of each level, those that fill whole micro-batches included."""
        return tuple(
            num * self.num_ranks // level.cp_size
            for num, level in zip(self.microbatches, self.levels, strict=True)
        )

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.num_steps

    @property
    def gpu_days(self) -> float:
        """Of one epoch."""
        return self.seconds * self.num_devices / 86400


def predict(
    levels: Sequence[Level], seq_lens: np.ndarray | LengthHistogram, cost: CostModel
) -> Prediction:
    """The predicted epoch of given levels. Raises ValueError for levels that no plan can have."""
    histogram = seq_lens if isinstance(seq_lens, LengthHistogram) else LengthHistogram(seq_lens)
    levels = tuple(levels)
    check_levels(levels, cost.layout.num_ranks)
    if histogram.longest > levels[-1].pack_len:
        raise ValueError(
            f"the longest sequence has {histogram.longest} tokens, level {levels[-1]} holds "
            f"{levels[-1].pack_len}; use a longer level"
        )
    times = EpochTimes(histogram, cost)
    epoch = times.start(LevelTime.of(levels[-1], cost))
    for level in reversed(levels[:-1]):
        epoch = times.with_shorter(epoch, LevelTime.of(level, cost))
    return prediction_of(times, times.finish(epoch))


def prediction_of(times: EpochTimes, epoch: Epoch) -> Prediction:
    """Of a finished epoch."""
    layout = times.cost.layout
    levels = tuple(time.level for time in reversed(epoch.levels))
    num_steps = sum(epoch.microbatches) // layout.num_microbatches
    slots = layout.num_ranks * layout.num_microbatches * levels[0].tokens_per_rank
    return Prediction(
        levels=levels,
        seconds=epoch.total,
        terms=dict(zip(TERMS, epoch.seconds.tolist(), strict=True)),
        num_steps=num_steps,
        microbatches=epoch.microbatches[::-1],
        own_packs=epoch.own_packs[::-1],
        padding=1.0 - times.histogram.num_tokens / (num_steps * slots),
        communication_ratio=epoch.cp_tokens / times.histogram.num_tokens,
        tokens_per_step=slots,
        num_ranks=layout.num_ranks,
        num_devices=layout.world_size,
    )
