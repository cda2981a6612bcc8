"""Megatron's own IndexedDataset reads the token and mask files of a corpus, value for value."""

import numpy as np
import pytest

from megatron_hbp.corpus import write_corpus

indexed_dataset = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed"
)


@pytest.mark.parametrize("vocab_size", [300, 100_000])
@pytest.mark.parametrize("mmap", [True, False])
def test_megatron_reads_the_corpus(tmp_path, vocab_size, mmap):
    rng = np.random.default_rng(0)
    lengths = [2, 7, 3000, 2, 64]
    pairs = [(rng.integers(0, vocab_size, n), np.arange(n) % 3 == 1) for n in lengths]
    corpus = write_corpus(tmp_path / "c", pairs, vocab_size=vocab_size, end_id=0)
    tokens = indexed_dataset.IndexedDataset(str(corpus.path / "tokens"), mmap=mmap)
    mask = indexed_dataset.IndexedDataset(str(corpus.path / "mask"), mmap=mmap)
    assert len(tokens) == len(mask) == len(lengths)
    np.testing.assert_array_equal(tokens.sequence_lengths, corpus.seq_lens)
    np.testing.assert_array_equal(tokens.document_indices, np.arange(len(lengths) + 1))
    for i, (expected_tokens, expected_mask) in enumerate(pairs):
        np.testing.assert_array_equal(tokens[i], expected_tokens)
        np.testing.assert_array_equal(mask[i], expected_mask)
        np.testing.assert_array_equal(tokens[i], corpus.tokens(i))


def test_the_files_equal_those_of_megatron_s_builder(tmp_path):
    corpus = write_corpus(
        tmp_path / "c", [(np.arange(9), np.ones(9)), (np.arange(4), np.ones(4))],
        vocab_size=70_000, end_id=0,
    )  # fmt: skip
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32)
    for i in range(len(corpus)):
        builder.add_document(corpus.tokens(i), [int(corpus.seq_lens[i])])
    builder.finalize(str(tmp_path / "m.idx"))
    for end in ("bin", "idx"):
        ours = (corpus.path / f"tokens.{end}").read_bytes()
        assert ours == (tmp_path / f"m.{end}").read_bytes()
