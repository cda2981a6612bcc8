"""Corpora and plans made by hand: the same tokens lie on the same ranks under any CP size."""

from itertools import chain
from pathlib import Path

import numpy as np

from megatron_hbp.alignment import alignment
from megatron_hbp.audit import array_hash
from megatron_hbp.corpus import Corpus, write_corpus
from megatron_hbp.level import Level
from megatron_hbp.plan import Plan

VOCAB = 250


def random_corpus(folder: Path, lens: list[int], seed: int = 0, trained: float = 0.6) -> Corpus:
    """Random tokens; about `trained` of them trained, at least one per sequence of two or more."""
    rng = np.random.default_rng(seed)

    def sequences():
        for length in lens:
            mask = (rng.random(length) < trained).astype(np.uint8)
            mask[-1] = 1
            yield rng.integers(0, VOCAB, length), mask

    return write_corpus(folder, sequences(), vocab_size=VOCAB, end_id=0, info={"made_by": "test"})


def exact_slots(num_slots: int, budget: int, seed: int = 0) -> list[list[int]]:
    """Per slot, document lengths of 2 or more that add up to the budget exactly."""
    rng = np.random.default_rng(seed)
    slots = []
    for _ in range(num_slots):
        left, lens = budget, []
        while left > 0:
            length = int(min(left, rng.integers(2, max(3, budget // 2))))
            length = left if left - length < 2 else length
            lens.append(length)
            left -= length
        slots.append(lens)
    return slots


def plan_over_slots(
    corpus: Corpus,
    packs: list[list[int]],
    cp_of_microbatch: list[int],
    *,
    budget: int,
    num_ranks: int,
    num_microbatches: int,
    levels: tuple[Level, ...] | None = None,
    tp_size: int = 1,
) -> Plan:
    """packs: sequence ids of each pack, in plan order. cp_of_microbatch: its CP size."""
    if levels is None:
        levels = tuple(Level(budget * cp, cp) for cp in sorted(set(cp_of_microbatch)))
    index = {level.cp_size: i for i, level in enumerate(levels)}
    counts = [num_ranks // cp for cp in cp_of_microbatch]
    assert sum(counts) == len(packs)
    lens = np.asarray(corpus.seq_lens)
    plan = Plan(
        levels=levels,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_stages=1,
        seed=0,
        packer="best_fit",
        mixing="microbatch",
        curriculum_steps=0,
        overlong="error",
        alignment=alignment(
            tuple(level.cp_size for level in levels), tp_size=tp_size, sequence_parallel=True
        ),
        tokens_in=int(lens.sum()),
        tokens_dropped=0,
        tokens_truncated=0,
        seq_lens_hash=array_hash(lens),
        first_trained_hash=None,
        seq_lens=lens,
        sequence_ids=np.array([i for pack in packs for i in pack], dtype=np.int32),
        pack_offsets=np.cumsum([0, *map(len, packs)], dtype=np.int64),
        microbatch_offsets=np.cumsum([0, *counts], dtype=np.int64),
        microbatch_level=np.array([index[cp] for cp in cp_of_microbatch], dtype=np.int16),
        epoch_offsets=np.array([0, len(counts) // num_microbatches], dtype=np.int64),
        dropped_ids=np.zeros(0, dtype=np.int64),
        dropped_reason=np.zeros(0, dtype=np.int8),
        truncated_ids=np.zeros(0, dtype=np.int64),
        corpus_hash=corpus.hash,
        corpus_paths=(str(corpus.path),),
    )
    assert plan.audit(lens) == []
    return plan


def regrouped(
    folder: Path,
    corpus: Corpus,
    slots: list[list[int]],
    cp_of_microbatch: list[int],
    *,
    budget: int,
    num_ranks: int,
    num_microbatches: int,
    levels: tuple[Level, ...] | None = None,
    tp_size: int = 1,
) -> Path:
    """Saves a plan with slot r of micro-batch m always on rank r: packs are joined slots."""
    packs = []
    for m, cp in enumerate(cp_of_microbatch):
        here = slots[m * num_ranks : (m + 1) * num_ranks]
        packs += [list(chain(*here[r : r + cp])) for r in range(0, num_ranks, cp)]
    plan = plan_over_slots(
        corpus,
        packs,
        cp_of_microbatch,
        budget=budget,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        levels=levels,
        tp_size=tp_size,
    )
    plan.save(folder)
    return folder
