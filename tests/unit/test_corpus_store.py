"""The store: round trip, atomic writes, damage, refusals."""

import hashlib
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hbp.corpus import Corpus, write_corpus
from megatron_hbp.corpus.writer import CorpusWriter, Sequences, staged_folder


def _pairs(count=20, vocab=1000, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        length = int(rng.integers(2, 50))
        mask = rng.integers(0, 2, length).astype(np.uint8)
        mask[-1] = 1
        yield rng.integers(0, vocab, length), mask


def _write(path, count=20, vocab=1000, seed=0):
    return write_corpus(path, _pairs(count, vocab, seed), vocab_size=vocab, end_id=2, info={})


@pytest.mark.parametrize(("vocab", "dtype"), [(1000, np.uint16), (65500, np.int32)])
def test_round_trip(tmp_path, vocab, dtype):
    corpus = _write(tmp_path / "c", vocab=vocab)
    expected = list(_pairs(vocab=vocab))
    assert len(corpus) == len(expected)
    assert corpus.seq_lens.dtype == corpus.num_trained.dtype == np.int32
    assert corpus.seq_lens.flags.aligned
    assert corpus.source_ids is None
    for i, (tokens, mask) in enumerate(expected):
        assert corpus.tokens(i).dtype == dtype
        assert corpus.tokens(i).base is not None  # a view, not a copy
        np.testing.assert_array_equal(corpus.tokens(i), tokens)
        np.testing.assert_array_equal(corpus.mask(i), mask)
        np.testing.assert_array_equal(corpus.tokens(i, 1), tokens[:1])
        np.testing.assert_array_equal(corpus.mask(i, 2), mask[:2])
        assert corpus.seq_lens[i] == len(tokens)
        assert corpus.first_trained[i] == np.flatnonzero(mask[1:])[0] + 1
        assert corpus.num_trained[i] == mask[1:].sum()
    assert corpus.max_token_id == max(t.max() for t, _ in expected) < corpus.vocab_size == vocab
    assert corpus.end_id == 2
    with pytest.raises(ValueError, match="read-only"):
        corpus.tokens(0)[0] = 1


def test_first_token_is_never_a_target(tmp_path):
    corpus = write_corpus(
        tmp_path / "c", [(np.array([5, 6, 7]), np.array([1, 0, 1]))], vocab_size=10, end_id=-1
    )
    assert (corpus.first_trained[0], corpus.num_trained[0]) == (2, 1)


@pytest.mark.parametrize(
    ("tokens", "mask", "message"),
    [
        ([5, 6], [0, 0], "sequence 0 has no trained token"),
        ([5], [1], "sequence 0 has no trained token"),
        ([], [], "sequence 0 has no trained token"),
        ([5, 10], [0, 1], "from 5 to 10; they must be from 0 to 9"),
        ([-1, 5], [0, 1], "they must be from 0 to 9"),
        ([5, 6], [1], "do not match"),
    ],
)
def test_bad_sequences_are_refused(tmp_path, tokens, mask, message):
    pair = (np.array(tokens, dtype=np.int64), np.array(mask, dtype=np.uint8))
    with pytest.raises(ValueError, match=message):
        write_corpus(tmp_path / "c", [pair], vocab_size=10, end_id=2)
    assert list(tmp_path.iterdir()) == []  # nothing half-written stays


def test_no_sequences_at_all(tmp_path):
    with pytest.raises(ValueError, match="no sequence with a trained token"):
        write_corpus(tmp_path / "c", [], vocab_size=10, end_id=2)


def test_end_id_out_of_range(tmp_path):
    with pytest.raises(ValueError, match="end id 10 is not below"):
        write_corpus(tmp_path / "c", [], vocab_size=10, end_id=10)


def test_same_content_same_bytes_other_content_refused(tmp_path):
    first = _write(tmp_path / "a")
    second = _write(tmp_path / "b")
    assert first.hash == second.hash
    for file in sorted(first.path.iterdir()):
        assert file.read_bytes() == (second.path / file.name).read_bytes()
    before = {file: file.stat().st_mtime_ns for file in first.path.iterdir()}
    assert _write(tmp_path / "a").hash == first.hash  # left alone
    assert {file: file.stat().st_mtime_ns for file in first.path.iterdir()} == before
    with pytest.raises(ValueError, match=r"exists and is not this corpus.*name another folder"):
        _write(tmp_path / "a", seed=1)
    assert _write(tmp_path / "d", seed=1).hash != first.hash


def test_empty_folder_is_taken(tmp_path):
    (tmp_path / "c").mkdir()
    assert len(_write(tmp_path / "c")) == 20


def test_missing_folder_names_the_command(tmp_path):
    with pytest.raises(ValueError, match="make the corpus with `hbp prepare --output"):
        Corpus.open(tmp_path / "nothing")


def test_other_version(tmp_path):
    corpus = _write(tmp_path / "c")
    document = json.loads((corpus.path / "corpus.json").read_text())
    document["format_version"] = 99
    (corpus.path / "corpus.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="format version 99, this release reads 2"):
        Corpus.open(corpus.path)


FILES = [
    "corpus.json",
    "tokens.bin",
    "tokens.idx",
    "mask.bin",
    "mask.idx",
    "seq_lens.npy",
    "first_trained.npy",
    "num_trained.npy",
]


@pytest.mark.parametrize("name", FILES)
def test_br_k04_half_files_are_detected(tmp_path, name):
    file = _write(tmp_path / "c").path / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"damaged .*make it again"):
        Corpus.open(tmp_path / "c")
    with pytest.raises(ValueError, match=r"exists and is not this corpus"):
        _write(tmp_path / "c")


@pytest.mark.parametrize("name", FILES)
def test_edited_and_missing_files_are_detected(tmp_path, name):
    file = _write(tmp_path / "c").path / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged|no corpus\.json|format version"):
        Corpus.open(tmp_path / "c")
    file.unlink()
    with pytest.raises(ValueError, match=f"{name} is missing|no corpus.json"):
        Corpus.open(tmp_path / "c")


def test_large_files_are_checked_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_hbp.corpus.store._HASHED_AT_OPEN", 0)
    file = _write(tmp_path / "c").path / "tokens.bin"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    Corpus.open(tmp_path / "c")
    with pytest.raises(ValueError, match=r"tokens\.bin does not match its hash"):
        Corpus.open(tmp_path / "c", verify=True)


def test_interrupted_write_leaves_nothing(tmp_path):
    def broken():
        yield from _pairs(3)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_corpus(tmp_path / "c", broken(), vocab_size=1000, end_id=2)
    assert list(tmp_path.iterdir()) == []


def _build_and_read(path):
    for _ in range(25):
        assert len(_write(path)) == 20
        assert len(Corpus.open(path, verify=True)) == 20


def test_br_k04_writers_and_readers_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_build_and_read, args=(tmp_path / "c",)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_other_users_may_read(tmp_path):
    assert _write(tmp_path / "c").path.stat().st_mode & 0o777 != 0o700


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 299), min_size=2, max_size=9), min_size=1, max_size=8))
def test_any_sequences_round_trip(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("c") / "c"
    pairs = [(np.array(row), np.array([0] + [1] * (len(row) - 1))) for row in rows]
    corpus = write_corpus(path, pairs, vocab_size=300, end_id=0)
    assert [corpus.tokens(i).tolist() for i in range(len(corpus))] == rows


def test_documented_hashes_are_true(tmp_path):
    corpus = _write(tmp_path / "c")
    for name, (size, digest) in corpus.info["files"].items():
        content = Path(corpus.path, name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size, digest)
    assert corpus.info["trained_tokens"] == int(corpus.num_trained.sum())


def test_writer_memory_does_not_grow_with_tokens(tmp_path):
    import tracemalloc

    tokens, mask = np.zeros(200_000, np.uint16), np.ones(200_000, np.uint8)
    with (
        staged_folder(tmp_path / "c") as folder,
        CorpusWriter(folder, vocab_size=10, end_id=0) as writer,
    ):
        writer.add(Sequences.join([(tokens, mask)], [0], tokens.dtype))
        tracemalloc.start()
        for _ in range(50):  # 30 MB
            writer.add(Sequences.join([(tokens, mask)], [0], tokens.dtype))
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        writer.finish({})
    assert grown < 1_000_000
