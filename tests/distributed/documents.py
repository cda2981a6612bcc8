"""From a plan and what ranks recorded back to documents: the inverse of packing, for tests."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_hbp.corpus.store import Corpus
from megatron_hbp.plan import Plan
from tests.distributed.handmade import plan_over_slots

Documents = list[tuple[int, np.ndarray]]  # (sequence id, one number per kept position)


def packs_of_lengths(lens_of_packs: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """All lengths in order, and the sequence ids of each pack."""
    lens, packs = [], []
    for pack in lens_of_packs:
        packs.append(list(range(len(lens), len(lens) + len(pack))))
        lens += pack
    return lens, packs


def random_packs(
    cp_of_microbatch: list[int], *, budget: int, num_ranks: int, seed: int = 0
) -> list[list[int]]:
    """Document lengths per pack: two to four documents, most packs with a tail of padding."""
    rng = np.random.default_rng(seed)
    packs = []
    for cp in cp_of_microbatch:
        for _ in range(num_ranks // cp):
            full = budget * cp
            cuts = np.sort(rng.choice(np.arange(2, full + 1, 2), size=3, replace=False))
            lens = [int(n) for n in np.diff([0, *cuts])]
            packs.append([n for n in lens if n >= 2])
    return packs


def save_plan(folder: Path, *args: Any, **kwargs: Any) -> Plan:
    """`plan_over_slots`, saved."""
    plan = plan_over_slots(*args, **kwargs)
    plan.save(folder)
    return plan


def truncated(plan: Plan, kept_lens: dict[int, int]) -> Plan:
    """The plan with some sequences cut: {sequence id: tokens kept}."""
    lens = np.array(plan.seq_lens)
    for sequence, length in kept_lens.items():
        lens[sequence] = length
    cut = dataclasses.replace(
        plan,
        overlong="truncate",
        seq_lens=lens,
        truncated_ids=np.array(sorted(kept_lens), dtype=np.int64),
        tokens_truncated=int(plan.seq_lens.sum() - lens.sum()),
    )
    assert cut.audit(np.asarray(plan.seq_lens)) == []
    return cut


def packs_of_step(plan: Plan, step: int) -> list[int]:
    """Indices of the step's packs."""
    ends = plan.microbatch_offsets
    first = step * plan.num_microbatches
    return list(range(ends[first], ends[first + plan.num_microbatches]))


def target_mask(corpus: Corpus, plan: Plan, sequence: int) -> np.ndarray:
    """float64 [kept length]: 1 at positions whose next token is kept and trained."""
    length = int(plan.seq_lens[sequence])
    mask = np.zeros(length)
    mask[:-1] = corpus.mask(sequence, length)[1:] != 0
    return mask


def ave_token(corpus: Corpus, plan: Plan, step: int) -> Documents:
    """Weights of the token average: 1 / trained tokens of the step, on trained tokens."""
    ids = [int(i) for pack in packs_of_step(plan, step) for i in plan.pack(pack)]
    masks = [target_mask(corpus, plan, i) for i in ids]
    total = sum(float(mask.sum()) for mask in masks)
    return [(i, mask / total) for i, mask in zip(ids, masks, strict=True)]


def as_json(steps: list[Documents]) -> list[list[tuple[int, list[float]]]]:
    """What jobs_stock.train takes."""
    return [[(i, w.tolist()) for i, w in documents] for documents in steps]


def by_document(
    results: list[dict[str, Any]], plan: Plan, step: int, field: str, *, training: bool = True
) -> list[np.ndarray]:
    """A recorded per-token field of a step, joined over ranks and cut into documents.

    One array per sequence, in plan order: CP ranks' pieces are put together, the tail is left out.
    """
    pieces: dict[tuple[int, int], np.ndarray] = {}
    for rank, result in enumerate(results):
        for item in result["microbatches"]:
            if item["step"] == step and item["training"] == training:
                microbatch = step * plan.num_microbatches + item["microbatch"]
                pieces[plan.pack_index(microbatch, rank)] = np.asarray(item[field])
    documents = []
    for pack in packs_of_step(plan, step):
        level = plan.levels[plan.pack_level()[pack]]
        whole = np.concatenate([pieces[pack, cp_rank] for cp_rank in range(level.cp_size)])
        lens = plan.seq_lens[plan.pack(pack)]
        documents += np.split(whole[: lens.sum()], np.cumsum(lens)[:-1]) if len(lens) else []
    return documents


def relative_difference(ours: Any, truth: Any) -> float:
    """Largest difference over the largest entry of the truth."""
    ours, truth = (torch.as_tensor(x).double() for x in (ours, truth))
    assert ours.shape == truth.shape
    largest = truth.abs().max().item()
    difference = (ours - truth).abs().max().item()
    return difference / largest if largest else (0.0 if difference == 0.0 else float("inf"))


def worst_gradient(
    ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """The parameter whose gradient differs most, relative to its largest entry."""
    assert ours.keys() == truth.keys()
    return max((relative_difference(ours[name], truth[name]), name) for name in truth)
