"""A corpus in memory, for tests of what reads one; it counts what is read."""

from pathlib import Path

import numpy as np

from megatron_hbp.level import Level
from megatron_hbp.plan import Plan
from tests.distributed.handmade import plan_over_slots


class MemoryCorpus:
    """tokens_and_masks: per sequence its token ids and its mask of trained tokens (0 or 1)."""

    hash = "0" * 64
    path = Path("memory")
    source_ids = None

    def __init__(self, tokens_and_masks: list[tuple[list[int], list[int]]]) -> None:
        self._tokens = [np.array(tokens, dtype=np.int32) for tokens, _ in tokens_and_masks]
        self._masks = [np.array(mask, dtype=np.uint8) for _, mask in tokens_and_masks]
        self.seq_lens = np.array([len(t) for t in self._tokens], dtype=np.int32)
        self.num_trained = np.array([int(m[1:].sum()) for m in self._masks], dtype=np.int32)
        first = [1 + int(np.flatnonzero(m[1:])[0]) if m[1:].any() else len(m) for m in self._masks]
        self.first_trained = np.array(first, dtype=np.int32)
        flat = (np.concatenate(self._tokens), np.concatenate(self._masks))
        self.values = (flat,)
        self._starts = np.cumsum([0, *self.seq_lens[:-1]])
        self.reads = 0

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.reads += len(ids)
        return np.zeros(len(ids), dtype=np.int32), self._starts[ids]

    def tokens(self, i: int, length: int | None = None) -> np.ndarray:
        self.reads += 1
        return self._tokens[i][:length]

    def mask(self, i: int, length: int | None = None) -> np.ndarray:
        self.reads += 1
        return self._masks[i][:length]


def random_memory_corpus(lens: list[int], vocab: int = 1000, seed: int = 0) -> MemoryCorpus:
    """Random tokens, about half of them trained, at least one in a sequence of two or more."""
    rng = np.random.default_rng(seed)
    pairs = []
    for length in lens:
        mask = rng.integers(0, 2, length)
        mask[-1:] = 1
        pairs.append((rng.integers(0, vocab, length).tolist(), mask.tolist()))
    return MemoryCorpus(pairs)


def one_pack_plan(corpus: MemoryCorpus, pack_len: int, cp_size: int = 1) -> Plan:
    """All sequences in one pack, on cp_size ranks."""
    return plan_over_slots(
        corpus,  # type: ignore[arg-type]  # has what a plan needs of a corpus
        [list(range(len(corpus.seq_lens)))],
        [cp_size],
        budget=pack_len // cp_size,
        num_ranks=cp_size,
        num_microbatches=1,
        levels=(Level(pack_len, cp_size),),
    )
