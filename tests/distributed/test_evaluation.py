"""Evaluation over a validation corpus: whole, weighted by tokens, restarted exactly each time."""

import numpy as np
import pytest
import torch

from megatron_hbp.alignment import alignment
from megatron_hbp.config import HbpConfig
from megatron_hbp.host.plan_source import RunShape, validation_plan
from megatron_hbp.level import Level
from megatron_hbp.plan import Plan
from megatron_hbp.planner import build_plan
from tests.distributed import flags, handmade
from tests.distributed.documents import as_json, by_document, target_mask

BUDGET, RANKS = 32, 4
LEVELS = (Level(BUDGET, 1), Level(2 * BUDGET, 2), Level(4 * BUDGET, 4))
LEVEL_FLAGS = [text for level in LEVELS for text in ("--hbp-level", str(level))]


@pytest.mark.parametrize(
    ("rows", "batch", "normalizer"),
    [
        pytest.param([20, 90, 50], RANKS, "ave-token", id="br_j04_three_rows"),
        pytest.param(
            [2 + (37 * i) % 127 for i in range(37)],
            2 * RANKS,
            "sample-mean",
            id="more_rows_than_a_step",
        ),
    ],
)
def test_evaluation_is_the_token_mean_of_all_rows(cluster, tmp_path, *, rows, batch, normalizer):
    """Twice while training and once more after it: the last two see the same weights."""
    handmade.random_corpus(tmp_path / "train", [31] * 32, seed=1)
    valid = handmade.random_corpus(tmp_path / "valid", rows, seed=2, trained=0.3)
    argv = [
        *flags.COMMON,
        *flags.SIZE,
        *flags.GQA,
        *["--num-layers", "2", "--seq-length", str(BUDGET), "--global-batch-size", str(2 * RANKS)],
        *["--eval-interval", "2", "--train-iters", "4", "--eval-global-batch-size", str(batch)],
    ]
    ours = cluster.run(
        RANKS,
        "tests.distributed.jobs_recorded:train",
        argv=[
            *argv,
            *["--hbp-corpus", str(tmp_path / "train"), *LEVEL_FLAGS],
            *["--hbp-valid-corpus", str(tmp_path / "valid"), "--hbp-loss-normalizer", normalizer],
        ],
    )
    evaluations = [e["lm loss"] for e in ours[0]["evaluations"]]
    assert len(evaluations) == 3
    assert evaluations[0] != evaluations[1]  # trained in between
    assert evaluations[1] == evaluations[2]  # bit-equal: the same rows in the same places

    (folder,) = (tmp_path / "valid" / "plans").iterdir()
    plan = Plan.load(folder)
    assert plan.audit(np.asarray(valid.seq_lens)) == []
    ids = [int(i) for i in plan.sequence_ids]
    assert sorted(ids) == list(range(len(rows)))
    masks = [target_mask(valid, plan, i) for i in ids]
    trained = sum(mask.sum() for mask in masks)

    for result in ours:
        read = [item for item in result["microbatches"] if not item["training"]]
        once = len(plan.microbatch_level)
        assert len(read) == 3 * once
        for first, later in zip(read * 2, read[once:] * 2, strict=False):
            assert torch.equal(first["tokens"], later["tokens"])
            assert torch.equal(first["weights"], later["weights"])

    in_order = [i for step in range(plan.num_steps) for i in _ids_of_step(plan, step)]
    assert in_order == ids
    packed = [
        losses
        for step in range(plan.num_steps)
        for losses in by_document(ours, plan, step, "losses", training=False)
    ]
    total = sum(np.float64(p) @ mask for p, mask in zip(packed, masks, strict=True))
    assert evaluations[2] == pytest.approx(total / trained, rel=1e-6)

    torch.save(ours[0]["weights_at_evaluation"][2], tmp_path / "weights.pt")
    alone = cluster.run(
        1,
        "tests.distributed.jobs_stock:train",
        argv=argv,
        corpus=str(tmp_path / "valid"),
        steps=as_json([[(i, mask / trained) for i, mask in zip(ids, masks, strict=True)]]),
        weights_in=str(tmp_path / "weights.pt"),
    )[0]
    assert evaluations[2] == pytest.approx(alone["losses"][0], rel=1e-6)


def _ids_of_step(plan: Plan, step: int) -> list[int]:
    ends = plan.pack_offsets[plan.microbatch_offsets[:: plan.num_microbatches]]
    return [int(i) for i in plan.sequence_ids[ends[step] : ends[step + 1]]]


def _validation_plan(
    tmp_path, rows: list[int], levels, num_ranks: int, num_microbatches: int
) -> Plan:
    valid = handmade.random_corpus(tmp_path / "valid", rows)
    shape = RunShape(
        rank=0,
        num_ranks=num_ranks,
        num_microbatches=1,
        num_stages=1,
        num_virtual_stages=1,
        alignment_of=lambda levels: alignment(tuple(level.cp_size for level in levels)),
    )
    train = build_plan(
        np.array([levels[0].pack_len] * num_ranks, dtype=np.int32), levels, num_ranks
    )
    config = HbpConfig(plan="unused", valid_corpus=str(tmp_path / "valid"))
    found = validation_plan(config, train, num_microbatches, shape)
    assert found is not None
    assert found[0].audit(np.asarray(valid.seq_lens)) == []
    return found[0]


def test_br_j04_odd_number_of_rows_counts_every_row(tmp_path):
    """249 rows, two micro-batches, two ranks: each row once."""
    rows = [2 + i % 60 for i in range(249)]
    levels = (Level(64, 1), Level(128, 2))
    plan = _validation_plan(tmp_path, rows, levels, num_ranks=2, num_microbatches=2)
    assert sorted(plan.sequence_ids.tolist()) == list(range(249))


def test_br_a09_small_validation_set_gives_a_step(tmp_path):
    """20 rows of 941 tokens in packs of 4096, eight ranks, 16 packs a step: one step for all."""
    levels = (Level(4096, 1),)
    plan = _validation_plan(tmp_path, [941] * 20, levels, num_ranks=8, num_microbatches=2)
    assert plan.num_steps == 1
    assert sorted(plan.sequence_ids.tolist()) == list(range(20))
