"""Documents of a pack do not see each other, and the edges of packing do no harm.

Two kinds of proof: a changed token changes no logit of another document at CP 1, 2 and 4; and packs
at the edge (padding only, no trained token, one-token documents) train like each document alone on
the stock model.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_hbp.corpus import write_corpus
from tests.distributed import flags
from tests.distributed.documents import (
    as_json,
    ave_token,
    by_document,
    packs_of_lengths,
    packs_of_step,
    relative_difference,
    save_plan,
    truncated,
    worst_gradient,
)

END = 0  # the end id is also what a padding id would be
BUDGET = 16
FROZEN = ["--lr", "0", "--min-lr", "0", "--clip-grad", "1000"]
EIGHT_HEADS = [*flags.SIZE, "--num-attention-heads", "8"]
MODELS = {"mla-moe": [*flags.MLA, *flags.moe()], "gqa-dense": flags.GQA}


def _sft_corpus(folder, lens, fixed=None, copies=1, changes=()):
    """Documents of a prompt without loss and an answer that ends with the end token.

    fixed: {index: (tokens, mask)}. copies: the documents again and again; changes: (copy, index,
    position) of tokens that differ in that copy.
    """
    rng = np.random.default_rng(5)
    sequences = []
    for length in lens:
        tokens = rng.integers(1, 250, length)
        tokens[-1] = END
        mask = np.zeros(length, dtype=np.uint8)
        mask[max(1, length // 3) :] = 1
        sequences.append((tokens, mask))
    for index, sequence in (fixed or {}).items():
        sequences[index] = tuple(np.array(x) for x in sequence)
    everything = [(t.copy(), m) for _ in range(copies) for t, m in sequences]
    for copy, index, position in changes:
        tokens = everything[copy * len(lens) + index][0]
        tokens[position] = (tokens[position] + 1) % 250
    return write_corpus(folder, everything, vocab_size=250, end_id=END)


@pytest.mark.parametrize("model", MODELS)
def test_br_d01_changed_token_changes_no_other_document(cluster, tmp_path, model):
    """Steps 1 and 2 repeat step 0 with a token changed in each pack's first and last document."""
    cp_sizes = [4, 2, 1]
    lens_of_packs = [[24, 40], [12, 20], [20, 12], [6, 10], [3, 13], [16], [2, 5, 9]]
    lens, packs = packs_of_lengths(lens_of_packs)
    firsts = [pack[0] for pack in packs]
    lasts = [pack[-1] for pack in packs]
    corpus = _sft_corpus(
        tmp_path / "corpus",
        lens,
        copies=3,
        changes=[(1, first, 1 if lens[first] < 4 else 3) for first in firsts]
        + [(2, last, 0) for last in lasts],
    )
    plan = save_plan(
        tmp_path / "plan",
        corpus,
        [[i + copy * len(lens) for i in pack] for copy in range(3) for pack in packs],
        cp_sizes * 3,
        budget=BUDGET,
        num_ranks=4,
        num_microbatches=3,
    )
    argv = [
        *flags.COMMON,
        *EIGHT_HEADS,
        *MODELS[model],
        *FROZEN,
        "--seq-length",
        str(BUDGET),
        "--global-batch-size",
        "12",
    ]
    ours = cluster.run(
        4,
        "tests.distributed.jobs_recorded:train",
        argv=[*argv, "--hbp-plan", str(tmp_path / "plan")],
        with_logits=True,
    )
    base, first_changed, last_changed = (by_document(ours, plan, s, "logits") for s in range(3))
    for index, length in enumerate(lens):
        assert base[index].shape == (length, 256)
        for changed, others, position in (
            (first_changed, firsts, 1 if length < 4 else 3),
            (last_changed, lasts, 0),
        ):
            difference = np.abs(changed[index] - base[index]).max(axis=1)
            if index in others:
                assert (difference[:position] < 1e-6).all()  # causal
                assert (difference[position:] > 1e-4).all()
            else:
                assert (difference < 1e-6).all()


@pytest.fixture(scope="module")
def edges(cluster, tmp_path_factory):
    """One run over packs at the edge, four ranks, S = 16, and each document alone."""
    folder = tmp_path_factory.mktemp("edges")
    lens_of_packs = [
        *[[10], []],  # step 0: CP 4 with three ranks of padding; CP 4 filler
        *[[2] * 7, [6, 3], [16], []],  # step 1: CP 1, one-token documents first
        *[[], []],  # CP 2 without a trained token
        *[[2, 2, 5, 15, 16, 17]],  # step 2: CP 4, very short documents
        *[[3, 3], [], [2] * 8, [12]],  # CP 1
        *[[12, 20], [12, 7, 5]],  # step 3: CP 2
        *[[10]],  # CP 4
    ]
    cp_sizes = [4, 4, 1, 2, 4, 1, 2, 4]
    lens, packs = packs_of_lengths(lens_of_packs)
    one_token = [*packs[2], packs[8][0]]
    spanning = packs[14][1]
    corpus = _sft_corpus(
        folder / "corpus",
        lens,
        fixed={spanning: ([11, 12, 13, 21, 22, 23, END], [0, 0, 0, 1, 1, 1, 1])},
    )
    plan = truncated(
        save_plan(
            folder / "whole",
            corpus,
            packs,
            cp_sizes,
            budget=BUDGET,
            num_ranks=4,
            num_microbatches=2,
        ),
        dict.fromkeys(one_token, 1),
    )
    plan.save(folder / "plan")
    argv = [*flags.COMMON, *EIGHT_HEADS, *flags.MLA, *flags.moe(), *FROZEN]
    truth = cluster.run(
        1,
        "tests.distributed.jobs_stock:train",
        argv=[*argv, "--seq-length", str(BUDGET), "--train-iters", "1"],
        corpus=str(folder / "corpus"),
        steps=as_json([ave_token(corpus, plan, step) for step in range(4)]),
        weights_out=str(folder / "weights.pt"),
    )[0]
    ours = cluster.run(
        4,
        "tests.distributed.jobs_recorded:train",
        argv=[
            *argv,
            *["--seq-length", str(BUDGET), "--global-batch-size", "8"],
            *["--hbp-plan", str(folder / "plan")],
        ],
        weights=str(folder / "weights.pt"),
        gradients_at=list(range(4)),
    )
    return SimpleNamespace(
        folder=folder,
        argv=argv,
        corpus=corpus,
        plan=plan,
        truth=truth,
        ours=ours,
        packs=packs,
        one_token=one_token,
        spanning=spanning,
    )


def _equals_alone(edges, ours, step, truth_step):
    """Loss and every gradient on every rank, finite and equal to each document alone."""
    for result in ours:
        assert np.isfinite(result["gradient_norms"]).all()
        worst, name = worst_gradient(
            result["gradients_by_step"][step], edges.truth["gradients"][truth_step]
        )
        assert worst < 1e-5, name
    loss = ours[0]["losses"][step]["lm loss"]
    assert loss == pytest.approx(edges.truth["losses"][truth_step], rel=1e-6)


def _items(ours, step, microbatch):
    """What the ranks recorded of one micro-batch, by rank."""
    return [
        next(i for i in r["microbatches"] if (i["step"], i["microbatch"]) == (step, microbatch))
        for r in ours
    ]


def test_br_b04_rank_with_padding_only_cp_4(edges):
    """A document of 10 tokens in a pack of 64: ranks 1 to 3 hold padding only."""
    _equals_alone(edges, edges.ours, step=0, truth_step=0)
    counts = [item["returned"][1] for item in _items(edges.ours, 0, 0)]
    assert counts[0] == int(ave_token(edges.corpus, edges.plan, 0)[0][1].astype(bool).sum())
    assert counts[1:] == [0, 0, 0]
    for item in _items(edges.ours, 0, 0)[1:]:
        assert item["padding"].all()
        assert np.isfinite(np.asarray(item["losses"])).all()


def test_br_b04_rank_with_padding_only_cp_8(cluster, edges):
    """The same document over eight ranks of 8 tokens; six of them hold padding only."""
    document = edges.packs[0][0]
    corpus = write_corpus(
        edges.folder / "one",
        [(np.array(edges.corpus.tokens(document)), np.array(edges.corpus.mask(document)))],
        vocab_size=250,
        end_id=END,
    )
    save_plan(
        edges.folder / "one-plan", corpus, [[0]], [8], budget=8, num_ranks=8, num_microbatches=1
    )
    ours = cluster.run(
        8,
        "tests.distributed.jobs_recorded:train",
        argv=[
            *edges.argv,
            *["--seq-length", "8", "--global-batch-size", "8"],
            *["--hbp-plan", str(edges.folder / "one-plan")],
        ],
        weights=str(edges.folder / "weights.pt"),
        gradients_at=[0],
    )
    _equals_alone(edges, ours, step=0, truth_step=0)
    assert [item["returned"][1] > 0 for item in _items(ours, 0, 0)] == [True, True] + [False] * 6


def test_br_b01_micro_batch_without_trained_tokens(edges):
    """Steps 0 and 1 end with micro-batches of fillers at CP 4 and CP 2: zero loss, zero count."""
    for step in (0, 1):
        _equals_alone(edges, edges.ours, step, step)
        for item in _items(edges.ours, step, 1):
            assert item["returned"][:2] == (0.0, 0)
            assert np.isfinite(np.asarray(item["losses"])).all()


def test_br_b06_pack_of_one_token_documents(edges):
    """Seven documents of one token: nothing is trained, boundaries are right, nothing breaks."""
    item = _items(edges.ours, 1, 0)[0]
    assert item["bounds"] == (0, 1, 2, 3, 4, 5, 6, 7, 16)
    assert item["returned"][:2] == (0.0, 0)
    _equals_alone(edges, edges.ours, step=1, truth_step=1)


def test_br_b07_documents_shorter_than_the_cp_size(edges):
    """Documents of 1, 2, 5, 15, 16 and 17 tokens over four ranks."""
    item = _items(edges.ours, 2, 0)[0]
    assert item["bounds"] == (0, 1, 3, 8, 23, 39, 56, 64)
    _equals_alone(edges, edges.ours, step=2, truth_step=2)
    read = by_document(edges.ours, edges.plan, 2, "losses")
    for mine, alone in zip(read, edges.truth["token_losses"][2], strict=True):
        if len(mine) > 1:
            assert relative_difference(mine[:-1], alone[:-1]) < 1e-5


def test_br_f01_positions_restart_at_each_document(edges):
    """Boundaries 0, 3, 6: positions 0 1 2 0 1 2; every document counts from 0, over ranks too."""
    first = _items(edges.ours, 2, 1)[0]
    assert first["bounds"][:3] == (0, 3, 6)
    assert first["positions"][:6].tolist() == [0, 1, 2, 0, 1, 2]
    for step in range(4):
        for positions in by_document(edges.ours, edges.plan, step, "positions"):
            assert positions.tolist() == list(range(len(positions)))


def test_br_f02_rotary_table_is_long_enough(edges):
    """Documents of 12 and 20 tokens at CP 2 over ranks of 16: the table has the whole level."""
    for item in _items(edges.ours, 3, 0):
        assert item["rotary_rows"] == 64
    assert _items(edges.ours, 3, 0)[0]["max_seqlen"] == 20
    _equals_alone(edges, edges.ours, step=3, truth_step=3)


def test_br_d12_tail_is_one_document(edges):
    """Documents of 6 and 3 tokens in a pack of 16: three documents, the tail counts up from 0."""
    item = _items(edges.ours, 1, 0)[1]
    assert item["bounds"] == (0, 6, 9, 16)
    assert item["positions"].tolist() == [*range(6), *range(3), *range(7)]
    assert item["padding"].tolist() == [False] * 9 + [True] * 7


def test_br_b08_first_answer_token_has_loss(edges):
    """Prompt 11 12 13, answer 21 22 23 end, over the boundary between two ranks (12 + 7 > 16)."""
    place = [int(i) for p in packs_of_step(edges.plan, 3) for i in edges.plan.pack(p)].index(
        edges.spanning
    )
    weights = by_document(edges.ours, edges.plan, 3, "weights")[place]
    labels = by_document(edges.ours, edges.plan, 3, "labels")[place]
    assert weights.tolist() == [0, 0, 1, 1, 1, 1, 0]
    assert labels[2:6].tolist() == [21, 22, 23, END]


def test_br_c08_end_tokens_keep_their_loss(edges):
    """The end id is 0 and so would be a padding id: masks go by position, not by value."""
    trained_ends = documents = 0
    for step in range(4):
        weights = by_document(edges.ours, edges.plan, step, "weights")
        labels = by_document(edges.ours, edges.plan, step, "labels")
        for weight, label in zip(weights, labels, strict=True):
            assert weight[-1] == 0.0  # nothing follows a document's last token
            if len(weight) > 1:
                documents += 1
                trained_ends += int(weight[-2] == 1.0 and label[-2] == END)
    assert documents > 20
    assert trained_ends == documents
    for result in edges.ours:
        for item in result["microbatches"]:
            assert (item["weights"][item["padding"]] == 0).all()


def test_br_c09_padding_is_made_of_tokens_in_range(edges):
    """No padding id: the tail repeats real tokens, so every id is in the vocabulary."""
    real = {int(t) for i in range(len(edges.corpus)) for t in edges.corpus.tokens(i)}
    for result in edges.ours:
        for item in result["microbatches"]:
            assert {int(t) for t in item["tokens"][item["padding"]]} <= real


def test_br_g04_loss_function_returns_an_integer_count(edges):
    """Three values; the counts of all ranks add up to the step's trained tokens."""
    for step in range(4):
        items = [i for r in edges.ours for i in r["microbatches"] if i["step"] == step]
        assert {(str(i["returned"][2]), i["returned"][3]) for i in items} == {("torch.int32", 3)}
        trained = sum(int((w > 0).sum()) for _, w in ave_token(edges.corpus, edges.plan, step))
        assert sum(i["returned"][1] for i in items) == trained
