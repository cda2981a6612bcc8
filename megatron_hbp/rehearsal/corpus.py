"""Synthetic corpora whose lengths are a recipe's, scaled to the levels of a rehearsal.

Guarantees (asserted by tests/unit/test_rehearsal_corpus.py):
- a sequence that needs a level of the recipe needs the same one of the rehearsal, and within a
  level lengths keep their order;
- every level has at least two micro-batches of sequences an epoch, or half of its even share where
  that is less, whatever its share of tokens is in the recipe;
- the same recipe gives the same corpora, byte for byte.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_hbp.corpus import Corpus, write_corpus
from megatron_hbp.level import Level
from megatron_hbp.rehearsal.scale_model import VOCAB

_FULL = 0.97  # of the slots of a run; the rest is what packing loses
_TRAINED_SHARE = 0.6
_SHORTEST = 2  # tokens: one to train
# Short sequences are shrunk less than long ones: a pack of S tokens would hold as many as one of
# the real S otherwise, of two or three tokens each.
_EXPONENT = 0.5


def scaled_lengths(
    seq_lens: np.ndarray, before: Sequence[Level], after: Sequence[Level]
) -> np.ndarray:
    """int64 [n], tokens: lengths with the levels `before`, scaled piece by piece to `after`.

    Those beyond the longest level stay beyond it.
    """
    old = [0, *(level.pack_len for level in before)]
    new = [0, *(level.pack_len for level in after)]
    scaled = np.zeros(len(seq_lens), dtype=np.int64)
    for (low, high), (new_low, new_high) in zip(pairwise(old), pairwise(new), strict=True):
        here = (seq_lens > low) & (seq_lens <= high)
        share = ((seq_lens[here] - low) / (high - low)) ** _EXPONENT
        inside = new_low + np.ceil(share * (new_high - new_low)).astype(np.int64)
        scaled[here] = np.clip(inside, max(new_low + 1, _SHORTEST), new_high)
    beyond = seq_lens > old[-1]
    scaled[beyond] = np.maximum(new[-1] + 1, seq_lens[beyond] * new[-1] // old[-1])
    return scaled


def made_up_lengths(after: Sequence[Level]) -> np.ndarray:
    """int64 [n], tokens: for a recipe without lengths, a few of each level, most of them short."""
    bounds = [0, *(level.pack_len for level in after)]
    parts = [
        np.linspace(low + (high - low) // 8 + 1, high, 64 >> place).astype(np.int64)
        for place, (low, high) in enumerate(pairwise(bounds))
    ]
    return np.concatenate(parts)


def drawn_lengths(
    lengths: np.ndarray, levels: Sequence[Level], *, num_tokens: int, per_microbatch: int, seed: int
) -> np.ndarray:
    """int64 [n], tokens, shuffled: about num_tokens of them, each level as its share of tokens.

    lengths: scaled ones to draw from. per_microbatch: tokens of all ranks in a micro-batch.
    """
    rng = np.random.default_rng([seed, num_tokens])
    bounds = [0, *(level.pack_len for level in levels)]
    in_level = [lengths[(lengths > low) & (lengths <= high)] for low, high in pairwise(bounds)]
    total = max(1, sum(int(part.sum()) for part in in_level))
    wanted = [int(part.sum()) * num_tokens // total for part in in_level]
    least = min(2 * per_microbatch, num_tokens // (2 * len(levels)))
    longer = [max(tokens, least) for tokens in wanted[1:]]
    wanted = [max(num_tokens - sum(longer), least), *longer]
    drawn = []
    for part, tokens, (low, high) in zip(in_level, wanted, pairwise(bounds), strict=True):
        some = part if len(part) else np.arange(max(low + 1, _SHORTEST), high + 1)
        order = rng.choice(some, size=tokens // int(some.min()) + 1)
        drawn.append(order[: max(1, int(np.searchsorted(np.cumsum(order), tokens)))])
    beyond = lengths[lengths > bounds[-1]]
    if len(beyond):  # dropped or truncated by the recipe's policy
        drawn.append(beyond[:1])
    together = np.concatenate(drawn)
    rng.shuffle(together)
    return together


def write_synthetic(folder: Path, seq_lens: np.ndarray, seed: int) -> Corpus:
    """A corpus of random tokens, about 60 % of them trained, the last one always."""
    return write_corpus(
        folder,
        _sequences(seq_lens, seed),
        vocab_size=VOCAB,
        end_id=0,
        info={"made_by": "hbp rehearse"},
    )


def _sequences(seq_lens: np.ndarray, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    for length in seq_lens:
        mask = (rng.random(length) < _TRAINED_SHARE).astype(np.uint8)
        mask[-1] = 1
        yield rng.integers(0, VOCAB, length), mask


def write_corpora(
    folders: Sequence[Path],
    lengths: np.ndarray,
    levels: Sequence[Level],
    *,
    num_tokens: int,
    per_microbatch: int,
    seed: int,
) -> list[Corpus]:
    """The corpora of one flag, which share num_tokens; each has sequences of every level."""
    return [
        write_synthetic(
            folder,
            drawn_lengths(
                lengths,
                levels,
                num_tokens=int(num_tokens * _FULL) // len(folders),
                per_microbatch=-(-per_microbatch // len(folders)),
                seed=seed + place,
            ),
            seed + place,
        )
        for place, folder in enumerate(folders)
    ]
