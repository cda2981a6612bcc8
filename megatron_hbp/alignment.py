"""The multiples that document lengths and the token budget must have, in one function.

The planner charges packs by it, the plan stores it, start-up compares it with the run's.
"""

import math
from dataclasses import dataclass

# tokens per tensor-parallel shard that the low-precision recipes of Transformer Engine need
_RECIPE_MULTIPLES = {
    None: 1,
    "tensorwise": 16,
    "delayed": 16,
    "mxfp8": 32,
    "blockwise": 128,
}


@dataclass(frozen=True)
class Alignment:
    """budget_multiple: what S must be a multiple of.

    document_multiples: one per level, what each document's length in a pack is rounded up to.
    """

    budget_multiple: int
    document_multiples: tuple[int, ...]


def alignment(
    cp_sizes: tuple[int, ...],
    *,
    cp_layout: str = "contiguous",
    tp_size: int = 1,
    sequence_parallel: bool = False,
    fp8_recipe: str | None = None,
) -> Alignment:
    """The multiples for one run.

    cp_sizes: CP size of each level. cp_layout: "contiguous" (Ulysses; a document needs no padding)
    or "zigzag" (ring; CP x lcm(2, TP) per document). tp_size: tensor-parallel size; it counts for S
    when sequence_parallel splits the tokens. fp8_recipe: None, "delayed", "tensorwise", "mxfp8" or
    "blockwise". Raises ValueError for an unknown layout or recipe.
    """
    if fp8_recipe not in _RECIPE_MULTIPLES:
        raise ValueError(
            f"fp8 recipe {fp8_recipe!r} is unknown; use one of "
            f"{sorted(map(str, _RECIPE_MULTIPLES))}"
        )
    shards = tp_size if sequence_parallel else 1
    if cp_layout == "contiguous":
        documents = tuple(1 for _ in cp_sizes)
    elif cp_layout == "zigzag":
        documents = tuple(1 if cp == 1 else cp * math.lcm(2, tp_size) for cp in cp_sizes)
    else:
        raise ValueError(f"CP layout {cp_layout!r} is unknown; use 'contiguous' or 'zigzag'")
    return Alignment(shards * _RECIPE_MULTIPLES[fp8_recipe], documents)


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple
