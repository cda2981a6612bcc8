"""How well a plan packs, balances, mixes and fills the pipeline; each metric works on plain arrays.

Guarantees (asserted by tests/unit/test_metrics.py):
- 64-bit sums of tokens and squares; the same arrays give the same numbers;
- every ratio but mixing and stretch lies in [0, 1]; where a bound is given, no plan can pass it;
- a plan and any other placement of packs go through the same code.
It knows nothing of Plan.

Words: a rank's attention cost in a micro-batch is the sum of squared sequence lengths of its packs,
each divided by its CP size. An iteration is a micro-batch or a whole step. A micro-batch without
tokens is balanced.
"""

import numpy as np

from megatron_hbp.cost import DENSE_8B_H100, PackCost
from megatron_hbp.placement import Placement

# Bins of the mixing histogram: a sequence of up to 256 tokens is in bin 0, up to 1K in bin 1, ...
LENGTH_BINS = (256, 1024, 4096, 8192, 16384, 32768, 65536)


def padding_ratio(num_tokens: int, capacity_tokens: int) -> float:
    """PR: the share of the trained slots that holds no token. Lower is better."""
    return 1.0 - num_tokens / capacity_tokens if capacity_tokens else 0.0


def padding_ratio_bound(
    num_tokens_per_epoch: int, token_budget: int, num_ranks: int, num_microbatches: int, epochs: int
) -> float:
    """The least PR of any plan: whole steps of token_budget tokens per rank and micro-batch."""
    step_tokens = token_budget * num_ranks * num_microbatches
    num_steps = -(-num_tokens_per_epoch // step_tokens)
    return padding_ratio(num_tokens_per_epoch * epochs, num_steps * step_tokens * epochs)


def distribution_balance_ratio(tokens: np.ndarray) -> float:
    """DBR of tokens [iterations, ranks]: mean over iterations of sum(max - t) / (max x ranks).

    0 means that all ranks hold equally many tokens. Lower is better; the bound is 0.
    """
    return _imbalance(tokens)


def attention_balance_ratio(costs: np.ndarray) -> float:
    """ABR of attention costs [iterations, ranks], by the formula of DBR. The bound is 0."""
    return _imbalance(costs)


def communication_ratio(tokens: np.ndarray, cp_sizes: np.ndarray) -> float:
    """CR: the share of tokens in packs with CP above 1. Lower is better.

    tokens, cp_sizes: int [packs].
    """
    total = int(tokens.sum(dtype=np.int64))
    return int(tokens[cp_sizes > 1].sum(dtype=np.int64)) / total if total else 0.0


def communication_ratio_bound(
    seq_lens: np.ndarray, pack_lens: np.ndarray, cp_sizes: np.ndarray
) -> float:
    """The least CR: the share of tokens in sequences that no CP 1 level can hold.

    seq_lens: [sequences], tokens. pack_lens, cp_sizes: [levels].
    """
    longest = int(pack_lens[cp_sizes == 1].max(initial=0))
    total = int(seq_lens.sum(dtype=np.int64))
    return int(seq_lens[seq_lens > longest].sum(dtype=np.int64)) / total if total else 0.0


def tokens_per_rank(tokens: np.ndarray) -> float:
    """Ave-T: mean tokens per rank and iteration of tokens [iterations, ranks]. Higher is better."""
    return float(tokens.sum(dtype=np.int64)) / tokens.size if tokens.size else 0.0


def mixing_ratio(tokens: np.ndarray, steps: np.ndarray, classes: np.ndarray) -> float:
    """How much further steps are from the corpus than random steps with as many tokens.

    tokens, steps, classes: int [sequences], the length, step and class (length bin or domain) of
    each sequence, by ascending step. The distance of a step is the total variation between its
    token histogram over classes and that of all steps; the answer is the mean distance divided by
    that of random steps. 1 is as good as random, more is worse, 0 is perfect. Random steps are made
    with a fixed seed.
    """
    if len(tokens) == 0:
        return 1.0
    tokens = tokens.astype(np.int64)
    num_classes = int(classes.max()) + 1
    distance = _mean_distance(tokens, steps, classes, num_classes)
    step_ends = np.cumsum(np.bincount(steps, weights=tokens)).astype(np.int64)
    rng = np.random.Generator(np.random.PCG64(0))
    num_draws = max(1, min(16, 100_000 // len(tokens)))
    baseline = 0.0
    for _ in range(num_draws):
        order = rng.permutation(len(tokens))
        starts = np.cumsum(tokens[order]) - tokens[order]
        random_steps = np.searchsorted(step_ends, starts, side="right")
        baseline += _mean_distance(tokens[order], random_steps, classes[order], num_classes)
    baseline /= num_draws
    # with one step or one class both distances are zero up to rounding
    return distance / baseline if baseline > 1e-9 else 1.0


def pipeline_stretch(times: np.ndarray, num_stages: int) -> float:
    """How much longer a 1F1B pipeline takes than with equal micro-batches of the same total time.

    times: [steps, micro-batches]. The mean over steps of
    (sum t + (stages - 1) max t) / ((micro-batches + stages - 1) mean t). The bound is 1.
    """
    if times.size == 0:
        return 1.0
    counts = np.full(len(times), times.shape[1])
    return _stretch(times.sum(axis=1), times.max(axis=1), counts, num_stages)


def modelled_efficiency(rank_times: np.ndarray, work: float) -> float:
    """The share of the ranks' time that is work, when all wait for the slowest of each row.

    rank_times: [iterations, ranks], work and communication. work: the sum over sequences, in the
    same unit, without communication. Higher is better; the bound is 1.
    """
    lockstep = float(rank_times.max(axis=1, initial=0.0).sum()) * rank_times.shape[1]
    return work / lockstep if lockstep else 1.0


def plan_metrics(
    *,
    seq_lens: np.ndarray,
    sequence_ids: np.ndarray,
    pack_offsets: np.ndarray,
    microbatch_offsets: np.ndarray,
    microbatch_level: np.ndarray,
    pack_lens: np.ndarray,
    cp_sizes: np.ndarray,
    num_ranks: int,
    num_microbatches: int,
    num_stages: int,
    source_ids: np.ndarray | None = None,
    cost: PackCost = DENSE_8B_H100,
) -> dict[str, float]:
    """placement_metrics() of a plan's arrays (see plan.Plan)."""
    placement = Placement.of_levels(
        seq_lens=seq_lens,
        sequence_ids=sequence_ids,
        pack_offsets=pack_offsets,
        microbatch_offsets=microbatch_offsets,
        microbatch_level=microbatch_level,
        pack_lens=pack_lens,
        cp_sizes=cp_sizes,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
    )
    return placement_metrics(placement, num_stages, source_ids=source_ids, cost=cost)


def placement_metrics(
    placement: Placement,
    num_stages: int = 1,
    *,
    source_ids: np.ndarray | None = None,
    cost: PackCost = DENSE_8B_H100,
) -> dict[str, float]:
    """All metrics of a placement, each `name` with its bound `name_bound`.

    source_ids: int [sequences], the domain of each sequence. cost: what the modelled times of
    pipeline_stretch and modelled_efficiency are made of. With `_step`: ranks wait for each other at
    the end of a step instead of in every micro-batch. The bounds of tokens_per_rank and of
    modelled_efficiency are upper ones, the others are lower ones.
    """
    lens = placement.seq_lens[placement.sequence_ids].astype(np.int64)
    pack_cp = placement.pack_cp
    pack_counts = np.diff(placement.pack_offsets)
    pack_tokens, pack_squares = placement.pack_sums(lens), placement.pack_sums(lens * lens)
    tokens = placement.rank_sums(pack_tokens / pack_cp)
    costs = placement.rank_sums(pack_squares / pack_cp)
    times = placement.rank_sums(cost.per_rank(pack_counts, pack_tokens, pack_squares, pack_cp))
    work = float(cost.work(pack_counts, pack_tokens, pack_squares).sum())
    slowest = times.max(axis=1)

    num_tokens = int(lens.sum())
    least_padding = _least_padding(placement, num_tokens)
    num_slots = placement.num_microbatches * placement.num_ranks
    metrics = {
        "padding_ratio": padding_ratio(num_tokens, num_slots * placement.token_budget),
        "padding_ratio_bound": least_padding,
        "distribution_balance_ratio": distribution_balance_ratio(tokens),
        "distribution_balance_ratio_bound": 0.0,
        "distribution_balance_ratio_step": distribution_balance_ratio(placement.step_sums(tokens)),
        "distribution_balance_ratio_step_bound": 0.0,
        "attention_balance_ratio": attention_balance_ratio(costs),
        "attention_balance_ratio_bound": 0.0,
        "attention_balance_ratio_step": attention_balance_ratio(placement.step_sums(costs)),
        "attention_balance_ratio_step_bound": 0.0,
        "communication_ratio": communication_ratio(pack_tokens, pack_cp),
        "communication_ratio_bound": communication_ratio_bound(
            lens, np.array([placement.cp1_pack_len]), np.array([1])
        ),
        "tokens_per_rank": num_tokens / num_slots if num_slots else 0.0,
        "tokens_per_rank_bound": placement.token_budget * (1.0 - least_padding),
        "pipeline_stretch": _stretch(
            placement.step_sums(slowest),
            np.maximum.reduceat(slowest, placement.step_offsets[:-1]),
            np.diff(placement.step_offsets),
            num_stages,
        ),
        "pipeline_stretch_bound": 1.0,
        "modelled_efficiency": modelled_efficiency(times, work),
        "modelled_efficiency_bound": 1.0,
        "modelled_efficiency_step": modelled_efficiency(placement.step_sums(times), work),
        "modelled_efficiency_step_bound": 1.0,
    }
    steps = placement.sequence_step()
    classes = np.searchsorted(LENGTH_BINS, lens)
    metrics |= {"mixing_ratio": mixing_ratio(lens, steps, classes), "mixing_ratio_bound": 0.0}
    if source_ids is not None:
        sources = np.unique(source_ids[placement.sequence_ids], return_inverse=True)[1]
        metrics["source_mixing_ratio"] = mixing_ratio(lens, steps, sources)
        metrics["source_mixing_ratio_bound"] = 0.0
    return metrics


def _least_padding(placement: Placement, num_tokens: int) -> float:
    """The least padding ratio: whole steps where all are equally long, else whole micro-batches."""
    per_epoch = int(placement.seq_lens.sum(dtype=np.int64))
    epochs = round(num_tokens / per_epoch) if per_epoch else 0
    if epochs * per_epoch != num_tokens:  # sources have weights: epochs differ
        per_epoch, epochs = num_tokens, 1
    lengths = np.diff(placement.step_offsets)
    unit = int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 1
    return padding_ratio_bound(per_epoch, placement.token_budget, placement.num_ranks, unit, epochs)


def _stretch(
    totals: np.ndarray, largest: np.ndarray, num_microbatches: np.ndarray, num_stages: int
) -> float:
    """Mean pipeline stretch of steps, from the total and largest time of their micro-batches."""
    filling = num_stages - 1
    even = (num_microbatches + filling) * totals / num_microbatches
    taken = totals + filling * largest
    # a step without work takes no time
    stretch = np.divide(taken, even, out=np.ones(len(totals)), where=even > 0)
    return float(stretch.mean()) if len(stretch) else 1.0


def _imbalance(loads: np.ndarray) -> float:
    """Mean over rows of sum(max - load) / (max x columns); a row of zeros is balanced."""
    if loads.size == 0:
        return 0.0
    loads = loads.astype(np.float64)
    largest = loads.max(axis=1)
    mean = loads.mean(axis=1)
    lost = np.divide(largest - mean, largest, out=np.zeros_like(largest), where=largest > 0)
    return float(np.maximum(lost, 0.0).mean())


def _mean_distance(
    tokens: np.ndarray, steps: np.ndarray, classes: np.ndarray, num_classes: int
) -> float:
    """Mean over steps with tokens of the total variation from the histogram of all steps."""
    num_steps = int(steps.max()) + 1
    cells = np.bincount(
        steps * num_classes + classes, weights=tokens, minlength=num_steps * num_classes
    ).reshape(num_steps, num_classes)
    overall = cells.sum(axis=0) / cells.sum()
    per_step = cells.sum(axis=1)
    shares = cells[per_step > 0] / per_step[per_step > 0, None]
    return float(np.abs(shares - overall).sum(axis=1).mean() / 2)
