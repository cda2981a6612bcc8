"""From a file of rows to training steps: prepare, plan at start-up, the real loader and loop."""

import math

import pytest

from megatron_hbp import cli
from megatron_hbp.corpus.store import Corpus
from tests.distributed import flags

S, ROWS, MICROBATCHES = 256, 120, 2
LEVELS = ["--hbp-level", f"{S}:1", "--hbp-level", f"{2 * S}:2", "--hbp-overlong", "drop"]


@pytest.fixture(scope="module")
def corpus(shared_data, tmp_path_factory) -> Corpus:
    """Real rows of all lengths, by every seventh row of the shared file."""
    folder = tmp_path_factory.mktemp("rows")
    lines = (shared_data / "messages" / "mixed_long_short.jsonl").read_text().split("\n")
    (folder / "rows.jsonl").write_text("\n".join(lines[: 7 * ROWS : 7]))
    argv = ["--input", folder / "rows.jsonl", "--output", folder / "corpus"]
    argv += ["--tokenizer", shared_data / "tokenizer" / "tt2k"]
    assert cli.main(["prepare", *map(str, argv)]) == 0
    return Corpus.open(folder / "corpus")


def _trained(cluster, corpus, tp_size, num_workers):
    argv = [*flags.COMMON, *flags.SIZE, *flags.GQA, "--seq-length", str(S), *LEVELS]
    argv[argv.index("--vocab-size") + 1] = str(corpus.vocab_size - 1)
    argv[argv.index("--num-workers") + 1] = str(num_workers)
    argv[argv.index("--max-position-embeddings") + 1] = str(2 * S)
    argv += ["--global-batch-size", str(2 * MICROBATCHES), "--train-iters", "3"]
    argv += ["--tensor-model-parallel-size", str(tp_size), "--hbp-corpus", str(corpus.path)]
    results = cluster.run(2 * tp_size, "tests.distributed.jobs_rows:train", argv=argv)
    for result in results:
        assert "error" not in result, result
        assert result["iterators"] == ["RerunDataIterator"]
        assert len(result["losses"]) == 3
        assert all(math.isfinite(step["lm loss"]) for step in result["losses"])
    return results[-1]


def test_br_i10_three_steps_from_rows_to_weights(cluster, corpus):
    """TP 1 and TP 2; and, of J09, the same losses bit for bit with and without loader workers."""
    assert (corpus.seq_lens <= 2 * S).sum() >= 20  # both levels have something to hold
    assert (corpus.seq_lens > 2 * S).any()
    alone = _trained(cluster, corpus, tp_size=1, num_workers=0)
    first = alone["losses"][0]["lm loss"]
    assert first == pytest.approx(math.log(corpus.vocab_size), rel=0.1)
    assert alone["losses"] == _trained(cluster, corpus, tp_size=1, num_workers=1)["losses"]
    split = _trained(cluster, corpus, tp_size=2, num_workers=1)
    assert split["losses"][0]["lm loss"] == pytest.approx(first, rel=0.1)
