"""What others do, as placements to compare a plan with: one level, random and sorted batches,
levels without balancing.

Guarantees (asserted by tests/unit/test_baselines.py):
- every sequence is in exactly one pack and no pack is over its level's pack length;
- a micro-batch has one level; what a step lacks of packs stays empty, as with fillers;
- the same arguments give the same placement: randomness comes from the seed alone.
Online scheduling is in online.py. Nothing here balances.
"""

from collections.abc import Sequence

import numpy as np

from megatron_hbp.cost import DENSE_8B_H100, PackCost
from megatron_hbp.level import Level, check_levels
from megatron_hbp.metrics import attention_balance_ratio, placement_metrics
from megatron_hbp.packing import pack
from megatron_hbp.placement import Placement, check_fit, positions_in, runs
from megatron_hbp.plan import Plan
from megatron_hbp.planner import build_plan

SEQUENCE_ORDERS = ("input", "random", "ascending")


def single_level(
    seq_lens: np.ndarray,
    level: Level,
    num_ranks: int,
    num_microbatches: int = 1,
    *,
    packer: str = "isf",
    seed: int = 1234,
    multiple: int = 1,
) -> Placement:
    """Everything packed at one level, packs trained in the order in which the packer made them.

    seq_lens: int32|int64 [n], tokens of each sequence. packer: see packing.pack(). multiple: each
    length is charged rounded up to it. Raises ValueError for lengths the level cannot hold.
    """
    _check(seq_lens, (level,), num_ranks, num_microbatches, (multiple,))
    packs = pack(_charged(seq_lens, multiple), level.pack_len, packer, seed)
    return _placement(seq_lens, [(level, packs)], num_ranks, num_microbatches)


def next_fit(
    seq_lens: np.ndarray,
    level: Level,
    num_ranks: int,
    num_microbatches: int = 1,
    *,
    order: str = "input",
    seed: int = 1234,
    multiple: int = 1,
) -> Placement:
    """Sequences laid out one after another, a new pack whenever the next does not fit.

    order: "input" as Megatron's packed data sets, "random" for random batching, "ascending" for
    batches sorted by length. The rest as for single_level().
    """
    _check(seq_lens, (level,), num_ranks, num_microbatches, (multiple,))
    if order == "input":
        ids = np.arange(len(seq_lens))
    elif order == "random":
        ids = _rng(seed).permutation(len(seq_lens))
    elif order == "ascending":
        ids = np.argsort(seq_lens, kind="stable")
    else:
        raise ValueError(f"order {order!r} is unknown; use one of {', '.join(SEQUENCE_ORDERS)}")
    packs = ids, runs(_charged(seq_lens[ids], multiple), level.pack_len)
    return _placement(seq_lens, [(level, packs)], num_ranks, num_microbatches)


def unbalanced_levels(
    seq_lens: np.ndarray,
    levels: Sequence[Level],
    num_ranks: int,
    num_microbatches: int = 1,
    *,
    packer: str = "isf",
    seed: int = 1234,
    multiples: Sequence[int] | None = None,
) -> Placement:
    """The hierarchical groups of the HBP paper (GroupData, ISF, GreedyFill) without balancing.

    A sequence belongs to the shortest level that holds it. From the longest level down, a level's
    sequences are packed, then each pack is filled with sequences of shorter levels, the
    next-shorter one first, in random order while they fit. Packs and micro-batches are in random
    order. multiples: one per level (default 1). The rest as for single_level().
    """
    levels = tuple(levels)
    multiples = (1,) * len(levels) if multiples is None else tuple(multiples)
    _check(seq_lens, levels, num_ranks, num_microbatches, multiples)
    rng = _rng(seed)
    longest = [_longest(*pair) for pair in zip(levels, multiples, strict=True)]
    groups = np.searchsorted(longest, seq_lens)
    pools = [rng.permutation(np.flatnonzero(groups == index)) for index in range(len(levels))]
    packed = []
    for index in reversed(range(len(levels))):
        level, multiple = levels[index], multiples[index]
        charged = _charged(seq_lens, multiple)
        order, offsets = pack(
            charged[pools[index]], level.pack_len, packer, int(rng.integers(2**31))
        )
        packs = pools[index][order], offsets
        for shorter in reversed(range(index)):
            packs, pools[shorter] = _greedy_fill(packs, level.pack_len, charged, pools[shorter])
        packed.append((level, packs))
    return _placement(seq_lens, packed[::-1], num_ranks, num_microbatches, rng)


def plan_placement(plan: Plan) -> Placement:
    """A plan in the form of its baselines."""
    return Placement.of_levels(
        seq_lens=plan.seq_lens,
        sequence_ids=plan.sequence_ids,
        pack_offsets=plan.pack_offsets,
        microbatch_offsets=plan.microbatch_offsets,
        microbatch_level=plan.microbatch_level,
        pack_lens=np.array([level.pack_len for level in plan.levels]),
        cp_sizes=np.array([level.cp_size for level in plan.levels]),
        num_ranks=plan.num_ranks,
        num_microbatches=plan.num_microbatches,
    )


def ablation(
    seq_lens: np.ndarray,
    levels: Sequence[Level],
    num_ranks: int,
    num_microbatches: int = 1,
    *,
    seed: int = 1234,
    cost: PackCost = DENSE_8B_H100,
) -> dict[str, dict[str, float]]:
    """The HBP paper's ablation: metrics of ISF at the longest level, levels, levels + balance.

    Levels are packed by best-fit decreasing: ISF leaves so much space in packs of long sequences
    that more short ones come to pay for CP than in the paper (CR 0.22, not 0.17, on its lengths).
    Beside placement_metrics(), attention_balance_ratio_replica: over the replicas of the longest
    level instead of over ranks, by which the paper's figures can be reproduced.
    Arguments as for build_plan().
    """
    plan = build_plan(seq_lens, levels, num_ranks, num_microbatches, seed=seed)
    longest = plan.levels[-1]
    rows = {
        f"{longest} isf": single_level(seq_lens, longest, num_ranks, num_microbatches, seed=seed),
        "levels": unbalanced_levels(
            seq_lens, levels, num_ranks, num_microbatches, packer="best_fit_decreasing", seed=seed
        ),
        "levels + balance": plan_placement(plan),
    }
    found = {}
    for name, placement in rows.items():
        lens = placement.seq_lens[placement.sequence_ids].astype(np.int64)
        costs = placement.rank_sums(placement.pack_sums(lens * lens) / placement.pack_cp)
        by_replica = costs.reshape(len(costs), num_ranks // longest.cp_size, -1).sum(axis=2)
        found[name] = placement_metrics(placement, cost=cost) | {
            "attention_balance_ratio_replica": attention_balance_ratio(by_replica),
            "attention_balance_ratio_replica_bound": 0.0,
        }
    return found


_PackArrays = tuple[np.ndarray, np.ndarray]  # sequence ids in pack order, offsets of the packs


def _greedy_fill(
    packs: _PackArrays, capacity: int, charged: np.ndarray, pool: np.ndarray
) -> tuple[_PackArrays, np.ndarray]:
    """Appends to each pack the next of the pool while they fit; the packs, and what is left."""
    ids, offsets = packs
    ends = np.concatenate([[0], np.cumsum(charged[ids])])
    spaces = capacity - (ends[offsets[1:]] - ends[offsets[:-1]])
    pool_ends = np.concatenate([[0], np.cumsum(charged[pool])])
    taken = np.zeros(len(spaces) + 1, dtype=np.int64)
    for index, space in enumerate(spaces.tolist()):
        limit = int(pool_ends[taken[index]]) + space
        taken[index + 1] = np.searchsorted(pool_ends, limit, side="right") - 1
    # where each pack ends, its additions follow
    filled = np.insert(ids, np.repeat(offsets[1:], np.diff(taken)), pool[: taken[-1]])
    return (filled, offsets + taken), pool[taken[-1] :]


def _placement(
    seq_lens: np.ndarray,
    packed: list[tuple[Level, _PackArrays]],
    num_ranks: int,
    num_microbatches: int,
    rng: np.random.Generator | None = None,
) -> Placement:
    """Micro-batches of one level each, level after level or, with an rng, in random order."""
    cp_sizes, microbatches = [], []
    total = 0
    for level, (_, offsets) in packed:
        num_packs = len(offsets) - 1
        slots = np.arange(num_packs) if rng is None else rng.permutation(num_packs)
        microbatches.append(total + slots // (num_ranks // level.cp_size))
        first_ranks = slots % (num_ranks // level.cp_size) * level.cp_size
        cp_sizes.append(np.stack([np.full(num_packs, level.cp_size), first_ranks]))
        total += -(-num_packs * level.cp_size // num_ranks)
    ids = np.concatenate([ids for _, (ids, _) in packed])
    counts = np.concatenate([np.diff(offsets) for _, (_, offsets) in packed])
    starts = np.cumsum(counts) - counts
    microbatch = np.concatenate(microbatches)
    if rng is not None:
        microbatch = rng.permutation(total)[microbatch]
    pack_cp, first_rank = np.concatenate(cp_sizes, axis=1)
    turn = np.lexsort((first_rank, microbatch))
    counts = counts[turn]
    num_steps = -(-total // num_microbatches)
    return Placement(
        seq_lens=seq_lens,
        sequence_ids=ids[np.repeat(starts[turn], counts) + positions_in(counts)],
        pack_offsets=np.concatenate([[0], np.cumsum(counts)]),
        pack_cp=pack_cp[turn],
        pack_first_rank=first_rank[turn],
        pack_microbatch=microbatch[turn],
        step_offsets=np.arange(num_steps + 1) * num_microbatches,
        num_ranks=num_ranks,
        token_budget=packed[0][0].tokens_per_rank,
        cp1_pack_len=max((level.pack_len for level, _ in packed if level.cp_size == 1), default=0),
    )


def _charged(seq_lens: np.ndarray, multiple: int) -> np.ndarray:
    """int64: the lengths, rounded up to a multiple."""
    return -(-seq_lens.astype(np.int64) // multiple) * multiple


def _rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def _longest(level: Level, multiple: int) -> int:
    """The longest sequence, in tokens, that a pack of the level holds."""
    return level.pack_len // multiple * multiple


def _check(
    seq_lens: np.ndarray,
    levels: tuple[Level, ...],
    num_ranks: int,
    num_microbatches: int,
    multiples: tuple[int, ...],
) -> None:
    check_levels(levels, num_ranks)
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; it must be at least 1")
    rule = f"the longest that level {levels[-1]} holds"
    check_fit(seq_lens, _longest(levels[-1], multiples[-1]), rule)
