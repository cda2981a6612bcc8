"""Levels of one token budget, and random lengths for them."""

import numpy as np

from megatron_hbp.packing import LevelPacks, pack_levels
from megatron_hbp.schedule import Shape

BUDGET = 256


def make_shape(cp_sizes=(1, 4), num_ranks=8, num_microbatches=4, **settings) -> Shape:
    cp_sizes = np.array(cp_sizes, dtype=np.int64)
    defaults = {
        "pack_lens": BUDGET * cp_sizes,
        "cp_sizes": cp_sizes,
        "multiples": np.ones_like(cp_sizes),
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "num_stages": 1,
        "num_virtual_stages": 1,
        "one_level": False,
        "alike": False,
        "max_mixing": 0.0,
        "cost": None,
        "source_of": None,
        "num_sources": 0,
    }
    return Shape(**{**defaults, **settings})


def random_lens(rng: np.random.Generator, num: int, longest: int) -> np.ndarray:
    """Log-normal lengths, some of them 0: what a corpus looks like."""
    lens = np.exp(rng.normal(np.log(longest) / 2, 1.2, num)).astype(np.int64).clip(1, longest)
    lens[rng.random(num) < 0.05] = 0
    return lens


def packs_of_levels(lens: np.ndarray, shape: Shape, units, seed=0) -> LevelPacks:
    return pack_levels(
        lens,
        pack_lens=shape.pack_lens,
        multiples=shape.multiples,
        units=np.asarray(units),
        packer="best_fit",
        seed=seed,
    )
