"""Each loss normalizer equals its formula, written out in NumPy float64 on per-token losses.

Four ranks, four micro-batches with uneven numbers of trained tokens and a tail of padding. The same
documents lie on the same ranks in four steps: CP 1 everywhere, CP 2, CP 4, and mixed; the weights
stand still (learning rate 0). Token losses come from the stock model (one document alone),
gradients from the formula's weights on them. A pack of CP size c counts for its c ranks in
token-mean, so its value depends on the packs: each step has its own formula value.
"""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_hbp.corpus import write_corpus
from megatron_hbp.normalizer import sequence_weights
from tests.distributed import flags
from tests.distributed.documents import (
    Documents,
    as_json,
    packs_of_step,
    save_plan,
    target_mask,
    worst_gradient,
)

BUDGET, RANKS, MICROBATCHES = 16, 4, 4
LAYOUTS = {"CP 1": [1, 1, 1, 1], "CP 2": [2, 2, 2, 2], "CP 4": [4, 4, 4, 4], "mixed": [4, 1, 2, 1]}
NORMALIZERS = ("ave-token", "token-mean", "sample-mean", "sum")


def token_weights(normalizer: str, corpus, plan, step: int) -> Documents:
    """The formula: what each token's loss counts for in the step's loss."""
    masks = {
        pack: [(int(i), target_mask(corpus, plan, int(i))) for i in plan.pack(pack)]
        for pack in packs_of_step(plan, step)
    }
    documents = [d for here in masks.values() for d in here]
    if normalizer == "sum":
        return documents
    if normalizer == "ave-token":
        total = sum(mask.sum() for _, mask in documents)
        return [(i, mask / total) for i, mask in documents]
    if normalizer == "sample-mean":
        return [(i, mask / mask.sum() / len(documents)) for i, mask in documents]
    assert normalizer == "token-mean"
    cp_size = {pack: plan.levels[plan.pack_level()[pack]].cp_size for pack in masks}
    trained = {pack: sum(mask.sum() for _, mask in here) for pack, here in masks.items()}
    slots = sum(cp_size[pack] for pack in masks if trained[pack] > 0)
    return [
        (i, mask / trained[pack] * cp_size[pack] / slots)
        for pack, here in masks.items()
        for i, mask in here
    ]


@pytest.fixture(scope="module")
def run(cluster, tmp_path_factory):
    """The plan, and the formula's losses and gradients per normalizer and step."""
    folder = tmp_path_factory.mktemp("normalizers")
    rng = np.random.default_rng(3)
    slots = [  # per rank and micro-batch; the last one a rank of padding only
        [int(n) for n in rng.integers(2, 6, size=rng.integers(1, 4))]
        for _ in range(RANKS * MICROBATCHES - 1)
    ] + [[]]
    lens = [n for slot in slots for n in slot]
    sequences = []
    for index, length in enumerate(lens):
        mask = (rng.random(length) < (0.2 if index % 3 else 0.9)).astype(np.uint8)
        mask[-1] = 1
        sequences.append((rng.integers(0, 250, length), mask))
    corpus = write_corpus(
        folder / "corpus", sequences * len(LAYOUTS), vocab_size=250, end_id=0, info={}
    )
    packs, start = [], 0
    for cp_sizes in LAYOUTS.values():
        ids = []
        for slot in slots:
            ids.append(list(range(start, start + len(slot))))
            start += len(slot)
        for microbatch, cp in enumerate(cp_sizes):
            here = ids[microbatch * RANKS : (microbatch + 1) * RANKS]
            packs += [list(chain(*here[rank : rank + cp])) for rank in range(0, RANKS, cp)]
    plan = save_plan(
        folder / "plan",
        corpus,
        packs,
        [cp for cp_sizes in LAYOUTS.values() for cp in cp_sizes],
        budget=BUDGET,
        num_ranks=RANKS,
        num_microbatches=MICROBATCHES,
    )
    argv = [
        *flags.COMMON,
        *flags.SIZE,
        *flags.GQA,
        *["--num-layers", "2", "--lr", "0", "--min-lr", "0", "--clip-grad", "1e9"],
        *["--seq-length", str(BUDGET), "--global-batch-size", str(RANKS * MICROBATCHES)],
    ]
    formulas = [
        token_weights(normalizer, corpus, plan, step)
        for normalizer in NORMALIZERS
        for step in range(len(LAYOUTS))
    ]
    truth = cluster.run(
        1,
        "tests.distributed.jobs_stock:train",
        argv=[*argv, "--train-iters", "1"],
        corpus=str(folder / "corpus"),
        steps=as_json(formulas),
        weights_out=str(folder / "weights.pt"),
    )[0]
    return SimpleNamespace(folder=folder, argv=argv, plan=plan, formulas=formulas, truth=truth)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_br_g01_and_g10_normalizer_equals_its_formula(cluster, run, normalizer):
    """Loss and every gradient of every layout. ave-token: BR-G01; sample-mean: BR-G10."""
    ours = cluster.run(
        RANKS,
        "tests.distributed.jobs_recorded:train",
        argv=[
            *run.argv,
            "--hbp-plan",
            str(run.folder / "plan"),
            "--hbp-loss-normalizer",
            normalizer,
        ],
        weights=str(run.folder / "weights.pt"),
        gradients_at=list(range(len(LAYOUTS))),
    )
    first = NORMALIZERS.index(normalizer) * len(LAYOUTS)
    for step, layout in enumerate(LAYOUTS):
        expected = sum(
            float(np.asarray(losses, dtype=np.float64) @ weights)
            for losses, (_, weights) in zip(
                run.truth["token_losses"][first + step], run.formulas[first + step], strict=True
            )
        )
        loss = ours[0]["losses"][step]["lm loss"]
        assert loss == pytest.approx(expected, rel=1e-6), layout
        for result in ours:
            worst, name = worst_gradient(
                result["gradients_by_step"][step], run.truth["gradients"][first + step]
            )
            assert worst < 1e-5, (layout, name)


def test_normalizers_differ(run):
    """The data are uneven enough to tell the formulas apart, by more than 1e-4 of the loss."""
    losses = np.array(run.truth["losses"]).reshape(len(NORMALIZERS), len(LAYOUTS))
    assert np.ptp(losses[[0, 2, 3]], axis=1) == pytest.approx([0, 0, 0], abs=1e-5)
    assert np.ptp(losses[1]) > 1e-4  # token-mean depends on the packs
    ordered = np.sort(losses[:, 0])
    assert (np.diff(ordered) > 1e-4 * ordered[0]).all()


def _loss_of_pack(normalizer: str, losses: list[list[float]]) -> float:
    """One pack that is a whole step: the host's sum of weight x loss over trained tokens."""
    counts = np.array([len(document) for document in losses])
    weights = sequence_weights(
        normalizer,
        sequence_trained=counts,
        step_trained=int(counts.sum()),
        step_sequences=len(losses),
        step_slots=1,
        pack_trained=int(counts.sum()),
        cp_size=1,
    )
    return float(sum(w * sum(d) for w, d in zip(weights, losses, strict=True)) / counts.sum())


def test_br_g01_and_g10_worked_examples():
    """Losses 6 over 3 tokens and 6 over 1: 3.0. Losses (4, 4), 2, 3: token 3.25, sample 3.0."""
    assert _loss_of_pack("ave-token", [[1.0, 2.0, 3.0], [6.0]]) == pytest.approx(3.0)
    assert _loss_of_pack("ave-token", [[4.0, 4.0], [2.0], [3.0]]) == pytest.approx(3.25)
    assert _loss_of_pack("sample-mean", [[4.0, 4.0], [2.0], [3.0]]) == pytest.approx(3.0)
