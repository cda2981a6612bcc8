"""Two corpora with weights in a real run: what is read, how often, and that it trains."""

import math

import numpy as np

from megatron_hbp.corpus.joint import open_corpora
from megatron_hbp.plan import Plan
from tests.distributed import flags, handmade
from tests.distributed.documents import by_document

BUDGET, RANKS, EPOCHS = 32, 2, 2
WEIGHTS = (1.0, 2.0)


def test_an_epoch_takes_each_corpus_as_often_as_its_weight(cluster, tmp_path):
    lens = ([20, 40, 31, 9] * 3, [10, 60, 5] * 2)
    folders = [tmp_path / "first", tmp_path / "second"]
    parts = [
        handmade.random_corpus(folder, part, seed=seed)
        for seed, (folder, part) in enumerate(zip(folders, lens, strict=True))
    ]
    argv = [*flags.COMMON, *flags.SIZE, *flags.GQA, "--num-layers", "2"]
    argv += ["--seq-length", str(BUDGET), "--global-batch-size", str(RANKS)]
    for folder, weight in zip(folders, WEIGHTS, strict=True):
        argv += ["--hbp-corpus", str(folder), "--hbp-source-weight", str(weight)]
    argv += ["--hbp-level", f"{BUDGET}:1", "--hbp-level", f"{2 * BUDGET}:2"]
    argv += ["--hbp-epochs", str(EPOCHS)]
    results = cluster.run(RANKS, "tests.distributed.jobs_recorded:train", argv=argv)

    (cached,) = (folders[0] / "plans").iterdir()
    plan, joint = Plan.load(cached), open_corpora(folders)
    assert plan.audit(joint.seq_lens) == []
    assert plan.source_weights == WEIGHTS
    assert len(results[0]["losses"]) == plan.num_steps
    assert all(math.isfinite(step["lm loss"]) for step in results[0]["losses"])

    read = [0, 0]
    ends = plan.pack_offsets[plan.microbatch_offsets[:: plan.num_microbatches]]
    for step in range(plan.num_steps):
        ids = plan.sequence_ids[ends[step] : ends[step + 1]]
        for sequence, tokens in zip(ids, by_document(results, plan, step, "tokens"), strict=True):
            source = int(joint.source_ids[sequence])
            own = parts[source].tokens(int(sequence) - source * len(lens[0]))
            np.testing.assert_array_equal(tokens, own)
            read[source] += 1
    assert read == [
        EPOCHS * int(weight) * len(part) for weight, part in zip(WEIGHTS, lens, strict=True)
    ]


def _on_two_nodes(cluster, tmp_path, valid_seeds):
    """Each rank has its own copy of the corpora; plans lie in it, so each rank makes its own."""
    own = []
    for rank, seed in enumerate(valid_seeds):
        node = tmp_path / f"node{rank}"
        handmade.random_corpus(node / "train", [20, 31, 9, 12] * 4)
        handmade.random_corpus(node / "valid", [10, 20, 30], seed=seed)
        own.append(["--hbp-corpus", str(node / "train"), "--hbp-valid-corpus", str(node / "valid")])
    argv = [*flags.COMMON, *flags.SIZE, *flags.GQA, "--num-layers", "2", "--train-iters", "2"]
    argv += ["--seq-length", str(BUDGET), "--global-batch-size", str(RANKS)]
    argv += ["--hbp-level", f"{BUDGET}:1"]
    return cluster.run(RANKS, "tests.distributed.jobs_nodes:train", argv=argv, own=own)


def test_br_k02_nodes_with_folders_of_their_own_train(cluster, tmp_path):
    results = _on_two_nodes(cluster, tmp_path, valid_seeds=(5, 5))
    assert len(results[0]["losses"]) == 2
    assert results[0]["losses"] == results[1]["losses"]
    made = [sorted(p.name for p in tmp_path.glob(f"node{r}/*/plans/*")) for r in range(RANKS)]
    assert made[0] == made[1]
    assert len(made[0]) == 2


def test_nodes_with_other_corpora_are_told_apart(cluster, tmp_path):
    results = _on_two_nodes(cluster, tmp_path, valid_seeds=(5, 6))
    assert [result["error"] for result in results] == ["1", "1"]  # the code each rank ends with
    assert (
        "megatron_hbp: error: ranks [1] hold another validation plan than rank 0 does: the corpus, "
        "the --hbp-plan or the release differs between nodes; copy the same to all of them\n"
    ) in results[0]["printed"]
