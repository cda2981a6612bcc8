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
