"""Parameters that `hbp check` counts on the meta device, against a real model's on every rank."""

from tests.distributed import flags, handmade
from tests.host.asked import ask

LAYOUT = """--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
--num-virtual-stages-per-pipeline-rank 2 --expert-model-parallel-size 2 --global-batch-size 8
--seq-length 32 --train-iters 1""".split()


def test_counts_of_every_stage_are_those_of_the_real_model(cluster, tmp_path):
    corpus = tmp_path / "corpus"
    handmade.random_corpus(corpus, [60, 33, 45, *[3 + (11 * i) % 29 for i in range(60)]])
    argv = [*flags.COMMON, *flags.SIZE, *flags.MLA, *flags.moe("aux_loss"), *LAYOUT]
    argv += ["--hbp-corpus", str(corpus), "--hbp-level", "32:1", "--hbp-level", "64:2"]
    facts = ask(tmp_path / "asked", argv, 8)
    assert facts.problems == []
    counts = cluster.run(8, "tests.distributed.jobs_counted:count", argv=argv)
    for stage, ranks in enumerate(([0, 1, 2, 3], [4, 5, 6, 7])):
        for rank in ranks:
            assert counts[rank]["dense"] == facts.stages[stage].dense_parameters
            assert counts[rank]["experts"] == facts.stages[stage].expert_parameters > 0
