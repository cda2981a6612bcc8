"""The profile that the HBP paper measures, computed by a cost model where nothing was measured.

Pack lengths are powers of two from 8192 tokens to the first that holds the longest sequence, CP
sizes 1 to 16 (paper: L = 8K .. 128K, SP 1 .. 16); each pair without recompute and with every layer
recomputed, in seconds and bytes.

Guarantees (asserted by tests/unit/test_paper_levels.py):
- paper_levels() chooses recompute from it as from a measured one.
"""

import numpy as np

from megatron_hbp.candidates import Candidates, allowed_cp_sizes
from megatron_hbp.cost_model import CostModel
from megatron_hbp.histogram import LengthHistogram
from megatron_hbp.level import Level
from megatron_hbp.profile import Point, Profile

SHORTEST_PACK = 8192
LARGEST_CP = 16


def paper_profile(histogram: LengthHistogram, cost: CostModel) -> Profile:
    """Packs hold what the sequences that fit them hold on average.

    Raises ValueError when no CP size is possible.
    """
    cp_sizes, _ = allowed_cp_sizes(cost, Candidates())
    pack_lens = [SHORTEST_PACK]
    while pack_lens[-1] < histogram.longest:
        pack_lens.append(2 * pack_lens[-1])
    points = [
        _point(Level(pack_len, cp_size, layers), histogram, cost)
        for pack_len in pack_lens
        for cp_size in cp_sizes
        if cp_size <= LARGEST_CP and pack_len % cp_size == 0
        for layers in (0, cost.model.num_layers)
        if histogram.between(0, pack_len).sequences
    ]
    return Profile(cost.model.name, cost.device.name, cost.layout, tuple(points))


def _point(level: Level, histogram: LengthHistogram, cost: CostModel) -> Point:
    held = histogram.between(0, level.pack_len)
    squares = held.squares * level.pack_len / held.tokens
    counts, tokens = held.sequences * level.pack_len / held.tokens, level.pack_len
    seconds = cost.pack_seconds(
        level, *(np.array([float(value)]) for value in (counts, tokens, squares))
    )
    return Point(
        level,
        float(seconds.total[0]),
        tokens=tokens,
        squares=squares,
        memory_bytes=round(cost.memory(level).total),
    )
