"""Several makers of one corpus at once, and stores that were edited or are half there."""

import json
import os
import shutil
import signal
import time

import psutil
import pytest

from megatron_hbp.corpus import Corpus
from megatron_hbp.corpus.prepare import prepare_corpus
from tests.kills.prepare_runs import (
    CAP,
    OPTIONS,
    content,
    kill,
    mixed_inputs,
    saved_rows,
    start,
    until,
    work_of,
)
from tests.unit.corpus_samples import char_tokenizer, chat, write_rows


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    return mixed_inputs(folder / "rows", 700), char_tokenizer(folder / "t")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, given):
    """The files of a corpus that one process made."""
    options = {"max_length": CAP, "overlong": "truncate", "valid_share": 0.1}
    return content(prepare_corpus(*given, tmp_path_factory.mktemp("alone") / "c", **options).path)


def test_four_makers_of_the_same_corpus(tmp_path, given, alone):
    output = tmp_path / "c"
    runs = [start(*given, output, *OPTIONS, workers=1) for _ in range(4)]
    ends = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0] * 4, ends
    assert len({printed for printed, _ in ends}) == 1
    assert {errors for _, errors in ends} == {""}  # none took over anything
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    assert content(output) == alone


def test_makers_of_different_corpora_under_one_name(tmp_path, given):
    output = tmp_path / "c"
    flags = [("--valid-seed", str(seed)) for seed in range(2)]
    runs = [start(*given, output, *OPTIONS, *flag, workers=1) for flag in flags]
    ends = [run.communicate(timeout=300) for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 2], ends
    winner = [run.returncode for run in runs].index(0)
    (line,) = ends[1 - winner][1].splitlines()
    assert line == (
        f"hbp: error: {output} exists and is not this corpus (other valid seed); name another "
        "folder or remove it"
    )
    assert Corpus.open(output, verify=True).info["origin"]["valid_seed"] == winner
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_a_waiting_maker_takes_over(tmp_path, given, alone):
    output = tmp_path / "c"
    first = start(*given, output, *OPTIONS, workers=1, block_bytes=2000)
    until(lambda: bool(saved_rows(output)), "a checkpoint")
    os.kill(first.pid, signal.SIGSTOP)  # it holds the claim, however long it takes
    second = start(*given, output, *OPTIONS, workers=1)
    process = psutil.Process(second.pid)
    until(lambda: process.status() == psutil.STATUS_SLEEPING and process.cpu_times().user > 0.3,
          "the second to have started")  # fmt: skip
    time.sleep(1.0)
    assert second.poll() is None
    rows = saved_rows(output)
    kill(first)
    first.communicate()
    _, errors = second.communicate(timeout=300)
    assert second.returncode == 0
    assert errors == f"hbp: goes on after {rows} rows of an earlier run\n"
    assert content(output) == alone
    assert not work_of(output).exists()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    rows = [chat("ua", ["q", f"answer {i}"]) if i % 7 else chat("u") for i in range(60)]
    source = write_rows(folder / "rows.jsonl", rows)
    tokenizer = char_tokenizer(folder / "t")
    return prepare_corpus([source], tokenizer, folder / "c", valid_share=0.3), source, tokenizer


STORED = (
    *("tokens.bin", "tokens.idx", "mask.bin", "mask.idx", "corpus.json", "seq_lens.npy"),
    *("first_trained.npy", "num_trained.npy", "row_numbers.npy"),
)


def test_every_file_of_a_store_is_checked(store):
    corpus = store[0]
    files = {name for name in content(corpus.path) if not name.startswith("valid/")}
    assert files == {*STORED, "rejects.jsonl"}
    assert {name for name in content(corpus.path) if name.startswith("valid/")} == {
        f"valid/{name}" for name in STORED
    }


@pytest.mark.parametrize("part", ["", "valid"])
@pytest.mark.parametrize("name", STORED)
def test_br_k04_a_store_cut_or_flipped_anywhere(tmp_path, store, name, part, monkeypatch):
    """Each length it may be cut to is another size; each byte is under a hash."""
    monkeypatch.setattr("megatron_hbp.corpus.store._HASHED_AT_OPEN", 0)
    corpus, source, tokenizer = store
    folder = tmp_path / "c"
    shutil.copytree(corpus.path, folder)
    path = folder / part / name
    whole = path.read_bytes()
    last = len(whole.rstrip()) - 1  # JSON is the same without its line end
    for size in sorted({0, 1, 33, 34, len(whole) // 2, last}):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"damaged .*; remove it and make it again with"):
            Corpus.open(folder / part)
        with pytest.raises(ValueError, match="exists and is not this corpus"):
            prepare_corpus([source], tokenizer, folder, valid_share=0.3)
    path.write_bytes(whole + b" ")
    if name != "corpus.json":  # JSON with a space after it is the same
        with pytest.raises(ValueError, match=rf"{name} has {len(whole) + 1} bytes, not"):
            Corpus.open(folder / part)
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        for bit in (0, 6):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            path.write_bytes(data)
            with pytest.raises(ValueError, match=r"damaged|format version"):
                Corpus.open(folder / part, verify=True)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name}"):
        Corpus.open(folder / part)
    path.write_bytes(whole)
    assert Corpus.open(folder / part, verify=True)
    assert len(prepare_corpus([source], tokenizer, folder, valid_share=0.3)) == len(corpus)


def test_any_edit_of_the_document_is_found(tmp_path, store):
    folder = tmp_path / "c"
    shutil.copytree(store[0].path, folder)
    path = folder / "corpus.json"
    document = json.loads(path.read_text())
    for key, value in document.items():
        for edited in (
            {**document, key: None},
            {**document, key: [value]},
            {name: entry for name, entry in document.items() if name != key},
        ):
            path.write_text(json.dumps(edited))
            with pytest.raises(ValueError, match=r"damaged|format version"):
                Corpus.open(folder)
    for text in ("[]", "null", "{}", "\x00", '"x"', "{" * 9999):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"damaged|holds no corpus\.json"):
            Corpus.open(folder)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="damaged"):
        Corpus.open(folder)
    path.write_text(json.dumps({**document, "another": 1}))
    with pytest.raises(ValueError, match="was edited"):
        Corpus.open(folder)
    path.write_text(json.dumps(document))  # written otherwise, but the same
    Corpus.open(folder)
