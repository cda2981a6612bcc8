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

from megatron_hbp.alignment import round_up
from megatron_hbp.normalizer import sequence_weights, step_totals
from megatron_hbp.plan import Plan

TAIL_DOCUMENT = 4096  # tokens; the tail is cut into documents of at most this length


class SequenceStore(Protocol):
    """What the data set needs of a corpus."""

    @property
    def seq_lens(self) -> np.ndarray: ...
    @property
    def num_trained(self) -> np.ndarray: ...
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
        return int(np.diff(self.cu_seqlens).max())


def pack_layout(seq_lens: np.ndarray, pack_len: int, multiple: int = 1) -> PackLayout:
    """Lays documents of seq_lens tokens one after another, each rounded up to `multiple`.

    Raises ValueError when they do not fit.
    """
    lens = [round_up(int(n), multiple) for n in seq_lens]
    ends = np.cumsum([0, *lens])
    used = int(ends[-1])
    if used > pack_len:
        raise ValueError(
            f"{len(lens)} sequences need {used} tokens at a multiple of {multiple}, the pack has "
            f"{pack_len}: the plan was made for another alignment; make it again"
        )
    tail = list(range(used + TAIL_DOCUMENT, pack_len, TAIL_DOCUMENT))
    if used < pack_len:
        tail.append(pack_len)
    return PackLayout(np.concatenate([ends, tail]).astype(np.int32), len(lens))


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
        self.num_trained = _kept_trained(plan, corpus)
        self.totals = step_totals(plan, self.num_trained)

    def __len__(self) -> int:
        return len(self.plan.microbatch_level)

    def __getitem__(self, microbatch: int) -> dict[str, Any]:
        plan = self.plan
        level_index = int(plan.microbatch_level[microbatch])
        level = plan.levels[level_index]
        pack, cp_rank = plan.pack_index(microbatch, self.rank)
        ids = plan.pack(pack)
        multiple = plan.alignment.document_multiples[level_index]
        layout = pack_layout(plan.seq_lens[ids], level.pack_len, multiple)
        budget = plan.token_budget
        low = cp_rank * budget
        step = microbatch // plan.num_microbatches
        item: dict[str, Any] = {
            "level": level_index,
            "step": step,
            "microbatch": microbatch % plan.num_microbatches,
            "training": self.training,
            "cp_rank": cp_rank,
            "num_documents": layout.num_sequences,
            "max_seqlen": layout.max_seqlen,
            "cu_seqlens": torch.from_numpy(layout.cu_seqlens),
            "real_tokens_in_pack": int(plan.seq_lens[ids].sum(dtype=np.int64)),
            "trained_share": float(
                self.totals.trained_tokens[step] / max(1, self.totals.real_tokens[step])
            ),
        }
        item |= self._local_layout(ids, layout, low, low + budget)
        if self.with_tokens:
            item["tokens"] = torch.from_numpy(self._local_tokens(pack, ids, layout, low))[None]
        if self.with_labels:
            item |= self._local_labels(pack, ids, layout, low, step=step, cp_size=level.cp_size)
        return item

    def _local_layout(
        self, ids: np.ndarray, layout: PackLayout, low: int, high: int
    ) -> dict[str, torch.Tensor]:
        positions = np.empty(high - low, dtype=np.int64)
        padding = np.ones(high - low, dtype=bool)
        for document, start, end in _overlaps(layout.cu_seqlens, low, high):
            begin = int(layout.cu_seqlens[document])
            positions[start - low : end - low] = np.arange(start - begin, end - begin)
            if document < layout.num_sequences:
                real_end = min(end, begin + int(self.plan.seq_lens[ids[document]]))
                padding[start - low : max(start, real_end) - low] = False
        return {
            "positions": torch.from_numpy(positions),
            "padding_mask": torch.from_numpy(padding)[None],
        }

    def _local_tokens(self, pack: int, ids: np.ndarray, layout: PackLayout, low: int) -> np.ndarray:
        high = low + self.plan.token_budget
        tokens = np.empty(high - low, dtype=np.int64)
        for document, start, end in _overlaps(layout.cu_seqlens, low, high):
            begin = int(layout.cu_seqlens[document])
            if document >= layout.num_sequences:
                tokens[start - low : end - low] = self._filler_tokens(pack, document, end - start)
                continue
            length = int(self.plan.seq_lens[ids[document]])
            kept = self.corpus.tokens(int(ids[document]), length)
            piece = kept[start - begin : end - begin]
            tokens[start - low : start - low + len(piece)] = piece
            if len(piece) < end - start:  # padding of an aligned document repeats its own tokens
                tokens[start - low + len(piece) : end - low] = np.resize(
                    kept, end - start - len(piece)
                )
        return tokens

    def _filler_tokens(self, pack: int, document: int, count: int) -> np.ndarray:
        """Real tokens for the tail: of the sequences that follow the pack's start in the plan."""
        ids = self.plan.sequence_ids
        at = int(self.plan.pack_offsets[pack]) + document
        pieces, have = [], 0
        while have < count:
            sequence = int(ids[at % len(ids)])
            piece = self.corpus.tokens(sequence, int(self.plan.seq_lens[sequence]))
            pieces.append(piece)
            have += len(piece)
            at += 1
        return np.concatenate(pieces)[:count]

    def _local_labels(
        self, pack: int, ids: np.ndarray, layout: PackLayout, low: int, *, step: int, cp_size: int
    ) -> dict[str, Any]:
        high = low + self.plan.token_budget
        labels = np.zeros(high - low, dtype=np.int64)
        weights = np.zeros(high - low, dtype=np.float32)
        per_sequence = sequence_weights(
            self.normalizer,
            sequence_trained=self.num_trained[ids],
            step_trained=int(self.totals.trained_tokens[step]),
            step_sequences=int(self.totals.sequences[step]),
            step_slots=int(self.totals.trained_slots[step]),
            pack_trained=int(self.totals.pack_trained_tokens[pack]),
            cp_size=cp_size,
        )
        num_trained = 0
        for document, start, end in _overlaps(layout.cu_seqlens, low, high):
            if document >= layout.num_sequences:
                continue
            begin = int(layout.cu_seqlens[document])
            length = int(self.plan.seq_lens[ids[document]])
            # the target of position p is token p + 1; the last position has none
            first, last = start - begin + 1, min(end - begin + 1, length)
            if first >= last:
                continue
            here = slice(start - low, start - low + last - first)
            labels[here] = self.corpus.tokens(int(ids[document]), length)[first:last]
            trained = self.corpus.mask(int(ids[document]), length)[first:last] != 0
            weights[here] = np.where(trained, per_sequence[document], 0.0)
            num_trained += int(np.count_nonzero(trained))
        return {
            "labels": torch.from_numpy(labels)[None],
            "loss_weights": torch.from_numpy(weights),
            "num_trained": torch.tensor(num_trained, dtype=torch.int32),
        }


def _overlaps(cu_seqlens: np.ndarray, low: int, high: int) -> list[tuple[int, int, int]]:
    """(document, start, end) in pack coordinates of the documents that meet [low, high)."""
    first = int(np.searchsorted(cu_seqlens, low, side="right")) - 1
    found = []
    for document in range(first, len(cu_seqlens) - 1):
        start = max(low, int(cu_seqlens[document]))
        end = min(high, int(cu_seqlens[document + 1]))
        if start >= high:
            break
        found.append((document, start, end))
    return found


def _kept_trained(plan: Plan, corpus: SequenceStore) -> np.ndarray:
    """int32 [num_sequences]: trained tokens after truncation, 0 for dropped sequences."""
    kept = np.where(plan.seq_lens > 0, corpus.num_trained, 0)
    for sequence in plan.truncated_ids:
        mask = corpus.mask(int(sequence), int(plan.seq_lens[sequence]))
        kept[sequence] = np.count_nonzero(mask[1:])
    return kept
