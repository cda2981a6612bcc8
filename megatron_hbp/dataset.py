"""Plan + corpus + rank -> THD micro-batches of exactly S tokens.

Guarantees (asserted by tests/unit/test_dataset.py):
- every per-token array has the same length, S, on every rank and level;
- boundaries are int32, start at 0, strictly rise and end at pack_len; positions restart at 0 at
  each boundary; max_seqlen is the longest document, as a Python int;
- a token's loss weight sits where it is the target: the first answer token has loss, a document's
  last position none; weights and padding go by position, never by token value;
- what follows the last sequence (the tail), and a filler, are documents of their own, made of real
  tokens without loss and marked as padding.
It reads only what the rank needs: a middle pipeline stage reads no tokens.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from megatron_hbp import _C
from megatron_hbp.normalizer import kept_trained, sequence_weights, step_totals
from megatron_hbp.plan import Plan

TAIL_DOCUMENT = 4096  # tokens; the tail is cut into documents of at most this length


class SequenceStore(Protocol):
    """What the data set needs of a corpus.

    values: (tokens uint16 or int32, mask uint8) of each of its parts, all sequences one after
    another. locate: the part (int32 [n]) of each sequence and where it starts there (int64 [n]).
    """

    @property
    def seq_lens(self) -> np.ndarray: ...
    @property
    def num_trained(self) -> np.ndarray: ...
    @property
    def values(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]: ...
    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...
    def tokens(self, index: int, length: int | None = None) -> np.ndarray: ...
    def mask(self, index: int, length: int | None = None) -> np.ndarray: ...


@dataclass(frozen=True)
class PackLayout:
    """Where a pack's documents lie.

    cu_seqlens: int32 [num_documents + 1], tail documents included, from 0 to pack_len.
    num_sequences: how many of the documents are sequences; the others are tail.
    """

    cu_seqlens: np.ndarray
    num_sequences: int

    @property
    def max_seqlen(self) -> int:
        return int((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).max())


def pack_layout(seq_lens: np.ndarray, pack_len: int, multiple: int = 1) -> PackLayout:
    """Lays documents of seq_lens tokens one after another, each rounded up to `multiple`.

    Raises ValueError when they do not fit.
    """
    num = len(seq_lens)
    lens = seq_lens if multiple == 1 else -(-seq_lens // multiple) * multiple
    used = int(lens.sum(dtype=np.int64))
    if used > pack_len:
        raise ValueError(
            f"{num} sequences need {used} tokens at a multiple of {multiple}, the pack has "
            f"{pack_len}: the plan was made for another alignment; make it again"
        )
    tail = list(range(used + TAIL_DOCUMENT, pack_len, TAIL_DOCUMENT))
    if used < pack_len:
        tail.append(pack_len)
    cu_seqlens = np.zeros(num + 1 + len(tail), dtype=np.int32)
    np.cumsum(lens, out=cu_seqlens[1 : num + 1])
    cu_seqlens[num + 1 :] = tail
    return PackLayout(cu_seqlens, num)


class HbpDataset(torch.utils.data.Dataset):
    """Micro-batches of one rank, by index in the plan.

    rank: 0 .. num_ranks - 1, the place in the DP x CP domain. with_tokens and with_labels: whether
    this pipeline stage embeds tokens or computes the loss. Items are dicts of CPU tensors and plain
    numbers, so that the host may copy, replay and save them.
    """

    def __init__(
        self,
        plan: Plan,
        corpus: SequenceStore,
        rank: int,
        *,
        normalizer: str = "ave-token",
        with_tokens: bool = True,
        with_labels: bool = True,
        training: bool = True,
    ) -> None:
        self.plan = plan
        self.corpus = corpus
        self.rank = rank
        self.normalizer = normalizer
        self.with_tokens = with_tokens
        self.with_labels = with_labels
        self.training = training
        self.num_trained = kept_trained(plan, corpus)
        self.totals = step_totals(plan, self.num_trained)
        self._trained_share = self.totals.trained_tokens / np.maximum(1, self.totals.real_tokens)
        tokens, masks = zip(*corpus.values, strict=True)
        self._values = (list(tokens), list(masks))
        self._pack_offsets = np.asarray(plan.pack_offsets)  # plain: slices of a memmap are slow
        self._sequence_ids = np.asarray(plan.sequence_ids)
        self._seq_lens = np.asarray(plan.seq_lens)
        self._levels = np.asarray(plan.microbatch_level)

    def __len__(self) -> int:
        return len(self.plan.microbatch_level)

    def __getitem__(self, microbatch: int) -> dict[str, Any]:
        plan = self.plan
        level_index = int(self._levels[microbatch])
        level = plan.levels[level_index]
        pack, cp_rank = plan.pack_index(microbatch, self.rank)
        ids = self._sequence_ids[self._pack_offsets[pack] : self._pack_offsets[pack + 1]]
        lengths = self._seq_lens[ids].astype(np.int64)
        layout = pack_layout(
            lengths, level.pack_len, plan.alignment.document_multiples[level_index]
        )
        step = microbatch // plan.num_microbatches
        part = (layout.cu_seqlens, lengths, cp_rank * plan.token_budget, plan.token_budget)
        positions, padding = _C.pack_layout(*part)
        item: dict[str, Any] = {
            "level": level_index,
            "step": step,
            "microbatch": microbatch % plan.num_microbatches,
            "training": self.training,
            "cp_rank": cp_rank,
            "num_documents": layout.num_sequences,
            "max_seqlen": layout.max_seqlen,
            "cu_seqlens": torch.from_numpy(layout.cu_seqlens),
            "real_tokens_in_pack": int(lengths.sum()),
            "trained_share": float(self._trained_share[step]),
            "positions": torch.from_numpy(positions),
            "padding_mask": torch.from_numpy(padding[None]),
        }
        if not (self.with_tokens or self.with_labels):
            return item
        where = (*part, *self.corpus.locate(ids), *self._values)
        if self.with_tokens:
            tokens = _C.pack_tokens(*where)
            self._fill_tail(tokens, pack, layout, cp_rank * plan.token_budget)
            item["tokens"] = torch.from_numpy(tokens[None])
        if self.with_labels:
            weights = self._weights(pack, ids, step, level.cp_size)
            labels, loss_weights, num_trained = _C.pack_targets(*where, weights)
            item["labels"] = torch.from_numpy(labels[None])
            item["loss_weights"] = torch.from_numpy(loss_weights)
            item["num_trained"] = torch.tensor(num_trained, dtype=torch.int32)
        return item

    def _weights(self, pack: int, ids: np.ndarray, step: int, cp_size: int) -> np.ndarray:
        """float32 [sequences]: the loss weight of each sequence's trained tokens."""
        return sequence_weights(
            self.normalizer,
            sequence_trained=self.num_trained[ids],
            step_trained=int(self.totals.trained_tokens[step]),
            step_sequences=int(self.totals.sequences[step]),
            step_slots=int(self.totals.trained_slots[step]),
            pack_trained=int(self.totals.pack_trained_tokens[pack]),
            cp_size=cp_size,
        ).astype(np.float32)

    def _fill_tail(self, tokens: np.ndarray, pack: int, layout: PackLayout, low: int) -> None:
        """Gives the documents after the last sequence their tokens, in place."""
        bounds = layout.cu_seqlens
        high = low + len(tokens)
        for document in range(layout.num_sequences, len(bounds) - 1):
            start, end = max(low, int(bounds[document])), min(high, int(bounds[document + 1]))
            if start < end:
                filler = self._filler_tokens(pack, document, end - start)
                tokens[start - low : end - low] = filler

    def _filler_tokens(self, pack: int, document: int, count: int) -> np.ndarray:
        """Real tokens for the tail: of the sequences that follow the pack's start in the plan."""
        ids = self._sequence_ids
        at = int(self._pack_offsets[pack]) + document
        pieces, have = [], 0
        while have < count:
            sequence = int(ids[at % len(ids)])
            piece = self.corpus.tokens(sequence, int(self._seq_lens[sequence]))
            pieces.append(piece)
            have += len(piece)
            at += 1
        return np.concatenate(pieces)[:count]
