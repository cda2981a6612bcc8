"""The two plans of the demo: hierarchical, and the usual one: one level, ISF, random batches."""

import dataclasses

import numpy as np

from megatron_hbp.corpus.store import Corpus
from megatron_hbp.level import Level
from megatron_hbp.plan import Plan
from megatron_hbp.planner import build_plan

SEED = 1234


def hbp_plan(
    corpus: Corpus,
    levels: tuple[Level, ...],
    num_ranks: int,
    num_microbatches: int,
    curriculum_steps: int,
) -> Plan:
    """Levels, filling, balance and curriculum, one epoch."""
    return build_plan(
        corpus.seq_lens,
        levels,
        num_ranks,
        num_microbatches,
        curriculum_steps=curriculum_steps,
        first_trained=corpus.first_trained,
        corpus_hash=corpus.hash,
        corpus_paths=(str(corpus.path),),
    )


def isf_plan(corpus: Corpus, level: Level, num_ranks: int, num_microbatches: int) -> Plan:
    """Every sequence in ISF packs of one level, in random order: nothing is balanced."""
    plan = build_plan(
        corpus.seq_lens,
        (level,),
        num_ranks,
        num_microbatches,
        packer="isf",
        first_trained=corpus.first_trained,
        corpus_hash=corpus.hash,
        corpus_paths=(str(corpus.path),),
    )
    packs = [plan.pack(i) for i in np.random.default_rng(SEED).permutation(plan.num_packs)]
    shuffled = dataclasses.replace(
        plan,
        sequence_ids=np.concatenate(packs),
        pack_offsets=np.cumsum([0, *map(len, packs)], dtype=np.int64),
    )
    problems = shuffled.audit(np.asarray(corpus.seq_lens))
    assert not problems, problems
    return shuffled
