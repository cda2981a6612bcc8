"""Corpora, clusters and candidates of the tests of level selection."""

import dataclasses
import itertools

import numpy as np

from megatron_hbp.cost_model import analytic
from megatron_hbp.hardware import find_device
from megatron_hbp.level import Level
from megatron_hbp.models import find_model
from megatron_hbp.run_layout import RunLayout

H100 = find_device("h100-80gb")
LLAMA = find_model("llama-3.1-8b")


def slower(device, factor):
    """The device with links that carry `factor` as much."""
    return dataclasses.replace(
        device,
        intra_node_bandwidth=device.intra_node_bandwidth * factor,
        inter_node_bandwidth=device.inter_node_bandwidth * factor,
    )


def mixture(seed, num_short, num_long, longest):
    rng = np.random.default_rng(seed)
    short = np.clip(np.rint(rng.lognormal(np.log(500), 1.1, num_short)), 8, 8000).astype(np.int64)
    return np.concatenate([short, rng.integers(8000, longest, num_long)])


def model(device=H100, shape=LLAMA, **layout):
    return analytic(shape, device, RunLayout(**({"num_ranks": 16} | layout)))


CASES = {
    "dense": (mixture(0, 20000, 60, 65536), model(), (4096, 8192, 16384)),
    "slow links": (
        mixture(1, 20000, 40, 32768),
        model(slower(H100, 0.15), num_microbatches=4),
        (4096, 8192, 16384),
    ),
    "pipeline": (
        mixture(2, 20000, 40, 65536),
        model(slower(H100, 0.15), num_ranks=8, num_microbatches=8, num_stages=4),
        (8192, 16384, 24576),
    ),
    "experts": (
        mixture(3, 10000, 40, 32768),
        model(shape=find_model("deepseek-v2-lite"), num_ranks=8, num_microbatches=4, ep_size=8),
        (4096, 8192, 16384),
    ),
    "few": (
        mixture(4, 600, 4, 32768),
        model(slower(H100, 0.15), num_ranks=8, num_microbatches=2),
        (4096, 8192, 16384),
    ),
}


def every_set(lens, cost, budgets, cp_sizes):
    """All sets of levels that hold the lengths and fit in memory."""
    for budget in budgets:
        for size in range(1, len(cp_sizes) + 1):
            for chosen in itertools.combinations(cp_sizes, size):
                again = [cost.least_recompute(budget * cp, cp) for cp in chosen]
                if budget * chosen[-1] >= lens.max() and None not in again:
                    yield tuple(
                        Level(budget * cp, cp, layers)
                        for cp, layers in zip(chosen, again, strict=True)
                    )
