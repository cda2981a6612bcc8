"""A level: one pack length, the context-parallel (CP) size and the recompute it trains with.

Guarantees:
- a Level is valid once it exists: positive lengths, pack_len a multiple of cp_size;
- `Level.parse(str(level)) == level`;
- levels order by pack_len first.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

_TEXT = re.compile(r"(\d+):(\d+)(?::(\d+|full))?")


@dataclass(frozen=True)
class Level:
    """pack_len: tokens of one pack. cp_size: ranks that share it.

    recompute_layers: layers of the whole model whose activations are recomputed (split evenly over
    pipeline chunks, rounded up, Megatron's method `block`), or "full" for every layer.
    Raises ValueError when a value is impossible.
    """

    pack_len: int
    cp_size: int
    recompute_layers: int | Literal["full"] = 0

    def __post_init__(self) -> None:
        if self.pack_len < 1 or self.cp_size < 1:
            raise ValueError(f"level {self}: pack_len and cp_size must be at least 1")
        if self.pack_len % self.cp_size:
            raise ValueError(
                f"level {self}: pack_len must be S x cp_size, a multiple of {self.cp_size}; "
                f"use {self.pack_len // self.cp_size * self.cp_size or self.cp_size}"
            )
        if self.recompute_layers != "full" and self.recompute_layers < 0:
            raise ValueError(f"level {self}: recompute layers must be 0 or more, or 'full'")

    @property
    def tokens_per_rank(self) -> int:
        """The token budget S: tokens that each rank holds of a pack of this level."""
        return self.pack_len // self.cp_size

    def __str__(self) -> str:
        text = f"{self.pack_len}:{self.cp_size}"
        return text if self.recompute_layers == 0 else f"{text}:{self.recompute_layers}"

    @classmethod
    def parse(cls, text: str) -> "Level":
        """Reads PACK_LEN:CP[:RECOMPUTE], e.g. 16384:1:28 or 131072:8:full."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"level {text!r} is not PACK_LEN:CP[:RECOMPUTE]; RECOMPUTE is a number of layers "
                "or 'full', e.g. 16384:1:28 or 131072:8:full"
            )
        pack_len, cp_size, recompute = match.groups()
        if recompute is None or recompute == "full":
            return cls(int(pack_len), int(cp_size), "full" if recompute else 0)
        return cls(int(pack_len), int(cp_size), int(recompute))


def check_levels(levels: tuple[Level, ...], num_ranks: int) -> None:
    """Raises ValueError unless the levels can share one plan over num_ranks ranks.

    They ascend in pack_len, hold the same number of tokens per rank (iso-token), and every CP size
    divides the ranks.
    """
    if not levels:
        raise ValueError("no level given; name at least one, e.g. 16384:1")
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; it must be at least 1")
    for shorter, longer in pairwise(levels):
        if longer.pack_len <= shorter.pack_len:
            raise ValueError(
                f"levels {shorter} and {longer} do not ascend in pack_len; sort them, each once"
            )
    budget = levels[0].tokens_per_rank
    for level in levels:
        if level.tokens_per_rank != budget:
            raise ValueError(
                f"level {level} puts {level.tokens_per_rank} tokens on a rank, {levels[0]} puts "
                f"{budget}: pack_len must be S x cp_size with one S; use "
                f"{budget * level.cp_size}:{level.cp_size}"
            )
        if num_ranks % level.cp_size:
            raise ValueError(
                f"level {level}: CP size {level.cp_size} does not divide {num_ranks} ranks; choose "
                f"one of {[c for c in range(1, num_ranks + 1) if num_ranks % c == 0]}"
            )
