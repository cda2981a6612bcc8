"""What every rank has to do in every micro-batch of a placement, by the cost model.

Guarantees (asserted by tests/unit/test_simulate.py):
- where levels are given, a micro-batch is S tokens on every rank: a rank without a pack trains a
  filler; without levels packs cost their real tokens and a rank without one does nothing;
- nothing of [packs, ranks].
"""

from dataclasses import dataclass

import numpy as np

from megatron_hbp.cost_model import CostModel, PackSeconds
from megatron_hbp.level import Level, check_levels
from megatron_hbp.micro_batch import ATTENTION_BACKWARD
from megatron_hbp.placement import Placement, positions_in

# The terms of cost_model.PackSeconds, and those of them that are communication.
TERMS = (
    "fixed",
    "linear",
    "attention",
    "recompute",
    "cp_communication",
    "tp_communication",
    "moe_communication",
)
COMMUNICATION = TERMS[4:]
# Of each term, the share that is in the forward: the backward of a matrix product is two of them,
# recompute is in the backward, communication is the same in both.
_FORWARD = dict.fromkeys(COMMUNICATION, 1 / 2) | {
    "fixed": 1 / 3,
    "linear": 1 / 3,
    "attention": 1 / (1 + ATTENTION_BACKWARD),
    "recompute": 0.0,
}


@dataclass(frozen=True)
class RankWork:
    """levels: those that occur. microbatch_level: int64 [micro-batches], index of the longest.

    compute, communication, forward: float64 [micro-batches, ranks]; forward is the part of both
    that is in the forward. begins: bool [micro-batches, ranks], false for a rank that shares a pack
    with the rank before it. terms: float64 [levels, TERMS], rank-seconds. filler: float64 [levels].
    tokens, squares: int64 [packs]. level_tokens: int64 [levels].
    """

    levels: tuple[Level, ...]
    microbatch_level: np.ndarray
    compute: np.ndarray
    communication: np.ndarray
    forward: np.ndarray
    begins: np.ndarray
    terms: np.ndarray
    filler: np.ndarray
    tokens: np.ndarray
    squares: np.ndarray
    level_tokens: np.ndarray


def rank_work(placement: Placement, cost: CostModel, levels: tuple[Level, ...] | None) -> RankWork:
    """What every rank has to do in every micro-batch. levels: as for simulate.simulate()."""
    padded = levels is not None
    lens = placement.seq_lens[placement.sequence_ids].astype(np.int64)
    counts = np.diff(placement.pack_offsets)
    tokens, squares = placement.pack_sums(lens), placement.pack_sums(lens * lens)
    levels = _all_levels(placement, cost, levels)
    cp_sizes = np.array([level.cp_size for level in levels], dtype=np.int64)
    pack_level = np.searchsorted(cp_sizes, placement.pack_cp)
    microbatch_level = np.zeros(placement.num_microbatches, dtype=np.int64)
    np.maximum.at(microbatch_level, placement.pack_microbatch, pack_level)
    empty = placement.rank_sums(np.ones(len(counts))) == 0

    terms = np.zeros((len(levels), len(TERMS)))
    filler = np.zeros(len(levels))
    parts = np.zeros((3, len(counts)))
    cells = np.zeros((3, *empty.shape))
    for index, level in enumerate(levels):
        here = np.flatnonzero(pack_level == index)
        of = counts[here], tokens[here], squares[here]
        by_term = _by_term(cost.pack_seconds(level, *of, padded=padded))
        terms[index] = by_term.sum(axis=1) * level.cp_size
        filler[index] = by_term[:, of[0] == 0].sum() * level.cp_size
        parts[:, here] = _parts(by_term)
        places = empty & (microbatch_level == index)[:, None]
        if padded and places.any():
            by_term = _by_term(cost.pack_seconds(level, *np.zeros((3, 1), dtype=np.int64)))
            terms[index] += by_term[:, 0] * np.count_nonzero(places)
            filler[index] += by_term.sum() * np.count_nonzero(places)
            cells[:, places] = _parts(by_term)
    for index, of_packs in enumerate(parts):
        cells[index] += placement.rank_sums(of_packs)
    return RankWork(
        levels=levels,
        microbatch_level=microbatch_level,
        compute=cells[0],
        communication=cells[1],
        forward=cells[2],
        begins=_begins(placement, cost),
        terms=terms,
        filler=filler,
        tokens=tokens,
        squares=squares,
        level_tokens=np.bincount(pack_level, tokens, len(levels)).astype(np.int64),
    )


def _all_levels(
    placement: Placement, cost: CostModel, levels: tuple[Level, ...] | None
) -> tuple[Level, ...]:
    """A level for each CP size that occurs, ascending."""
    found = np.unique(placement.pack_cp).tolist()
    if levels is None:
        return tuple(_bare_level(placement.token_budget, cp_size, cost) for cp_size in found)
    check_levels(levels, placement.num_ranks)
    if levels[0].tokens_per_rank != placement.token_budget:
        raise ValueError(
            f"level {levels[0]} puts {levels[0].tokens_per_rank} tokens on a rank, the placement "
            f"{placement.token_budget}; give the levels that it was made with"
        )
    missing = set(found) - {level.cp_size for level in levels}
    if missing:
        raise ValueError(
            f"packs have CP size {min(missing)}, no level has; give a level for each of {found}"
        )
    return levels


def in_lockstep(cost: CostModel) -> bool:
    """Whether ranks exchange tokens in every layer."""
    return cost.model.num_experts > 0 and expert_ranks(cost) > 1


def expert_ranks(cost: CostModel) -> int:
    """How many neighbouring ranks share a group of experts."""
    layout = cost.layout
    return max(1, layout.ep_size * layout.expert_tp_size // layout.tp_size)


def _by_term(seconds: PackSeconds) -> np.ndarray:
    """float64 [TERMS, packs]."""
    return np.stack([getattr(seconds, name) for name in TERMS])


def _parts(by_term: np.ndarray) -> np.ndarray:
    """float64 [3, packs]: compute, communication, and of both together the forward."""
    first = len(TERMS) - len(COMMUNICATION)
    compute, communication = by_term[:first].sum(axis=0), by_term[first:].sum(axis=0)
    forward = np.array([_FORWARD[name] for name in TERMS]) @ by_term
    return np.stack([compute, communication, forward])


def _bare_level(token_budget: int, cp_size: int, cost: CostModel) -> Level:
    """A level for packs of a CP size that no one has named."""
    pack_len = token_budget * cp_size
    recompute = cost.least_recompute(pack_len, cp_size)
    return Level(pack_len, cp_size, "full" if recompute is None else recompute)


def _begins(placement: Placement, cost: CostModel) -> np.ndarray:
    """bool [micro-batches, ranks]: false where a rank begins together with the rank before it."""
    begins = np.ones((placement.num_microbatches, placement.num_ranks), dtype=bool)
    others = placement.pack_cp.astype(np.int64) - 1
    ranks = np.repeat(placement.pack_first_rank, others) + positions_in(others) + 1
    begins[np.repeat(placement.pack_microbatch, others), ranks] = False
    if in_lockstep(cost):
        begins &= np.arange(placement.num_ranks) % expert_ranks(cost) == 0
    return begins
