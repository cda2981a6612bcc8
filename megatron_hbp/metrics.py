"""How well a plan packs, balances, mixes and fills the pipeline; each metric works on plain arrays.

Guarantees (asserted by tests/unit/test_metrics.py):
- 64-bit sums of tokens and squares; the same arrays give the same numbers;
- every ratio but mixing and stretch lies in [0, 1]; where a bound is given, no plan can pass it.
It imports NumPy only and knows nothing of Plan.

Words: a rank's attention cost in a micro-batch is the sum of squared sequence lengths of its pack
divided by the CP size. An iteration is a micro-batch or a whole step.
"""

import numpy as np

# Bins of the mixing histogram: a sequence of up to 256 tokens is in bin 0, up to 1K in bin 1, ...
LENGTH_BINS = (256, 1024, 4096, 8192, 16384, 32768, 65536)
# At this length causal attention costs as much as the matrix products around it (12 x hidden size
# 4096); it turns tokens and attention cost into one time, in units of "one token's products".
LENGTH_AT_PAR = 49152


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
    taken = times.sum(axis=1) + (num_stages - 1) * times.max(axis=1)
    even = (times.shape[1] + num_stages - 1) * times.mean(axis=1)
    return float((taken / even).mean())


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
) -> dict[str, float]:
    """All metrics of a plan's arrays (see plan.Plan), each `name` with its bound `name_bound`.

    The bound of tokens_per_rank is an upper one, the others are lower ones.
    """
    lens = seq_lens[sequence_ids].astype(np.int64)
    packs_per_microbatch = np.diff(microbatch_offsets)
    pack_cp = np.repeat(cp_sizes[microbatch_level], packs_per_microbatch)
    pack_tokens = _pack_sums(lens, pack_offsets)
    # [micro-batches, ranks]: a pack of CP size c is the work of c ranks
    rank_tokens = np.repeat(pack_tokens / pack_cp, pack_cp).reshape(-1, num_ranks)
    rank_costs = np.repeat(_pack_sums(lens * lens, pack_offsets) / pack_cp, pack_cp)
    rank_costs = rank_costs.reshape(-1, num_ranks)
    by_step = (-1, num_microbatches, num_ranks)

    token_budget = int(pack_lens[0] // cp_sizes[0])
    num_tokens = int(lens.sum())
    per_epoch = int(seq_lens.sum(dtype=np.int64))
    epochs = round(num_tokens / per_epoch) if per_epoch else 0
    capacity = rank_tokens.size * token_budget
    least_padding = padding_ratio_bound(
        per_epoch, token_budget, num_ranks, num_microbatches, epochs
    )
    times = token_budget + rank_costs.max(axis=1, initial=0.0) / LENGTH_AT_PAR
    sequence_steps = np.repeat(
        np.arange(len(microbatch_level)) // num_microbatches,
        np.diff(pack_offsets[microbatch_offsets]),
    )
    metrics = {
        "padding_ratio": padding_ratio(num_tokens, capacity),
        "padding_ratio_bound": least_padding,
        "distribution_balance_ratio": distribution_balance_ratio(rank_tokens),
        "distribution_balance_ratio_bound": 0.0,
        "distribution_balance_ratio_step": distribution_balance_ratio(
            rank_tokens.reshape(by_step).sum(axis=1)
        ),
        "distribution_balance_ratio_step_bound": 0.0,
        "attention_balance_ratio": attention_balance_ratio(rank_costs),
        "attention_balance_ratio_bound": 0.0,
        "attention_balance_ratio_step": attention_balance_ratio(
            rank_costs.reshape(by_step).sum(axis=1)
        ),
        "attention_balance_ratio_step_bound": 0.0,
        "communication_ratio": communication_ratio(pack_tokens, pack_cp),
        "communication_ratio_bound": communication_ratio_bound(seq_lens, pack_lens, cp_sizes),
        "tokens_per_rank": num_tokens / rank_tokens.size if rank_tokens.size else 0.0,
        "tokens_per_rank_bound": token_budget * (1.0 - least_padding),
        "mixing_ratio": mixing_ratio(lens, sequence_steps, np.digitize(lens, LENGTH_BINS, True)),
        "mixing_ratio_bound": 0.0,
        "pipeline_stretch": pipeline_stretch(times.reshape(-1, num_microbatches), num_stages),
        "pipeline_stretch_bound": 1.0,
    }
    if source_ids is not None:
        sources = np.unique(source_ids[sequence_ids], return_inverse=True)[1]
        metrics["source_mixing_ratio"] = mixing_ratio(lens, sequence_steps, sources)
        metrics["source_mixing_ratio_bound"] = 0.0
    return metrics


def _imbalance(loads: np.ndarray) -> float:
    """Mean over rows of sum(max - load) / (max x columns); a row of zeros is balanced."""
    if loads.size == 0:
        return 0.0
    loads = loads.astype(np.float64)
    largest = loads.max(axis=1)
    mean = loads.mean(axis=1)
    lost = np.divide(largest - mean, largest, out=np.zeros_like(largest), where=largest > 0)
    return float(np.maximum(lost, 0.0).mean())


def _pack_sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """int64 [packs]: sums of values over each pack; 0 for an empty one."""
    ends = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return ends[offsets[1:]] - ends[offsets[:-1]]


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
