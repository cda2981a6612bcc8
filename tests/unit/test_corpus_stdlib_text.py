"""examples/stdlib_text.py: rows and a tokenizer that every machine can make."""

import json
import sysconfig

import numpy as np
import pytest

from examples.stdlib_text import train_tokenizer, write_rows
from megatron_hbp.corpus.prepare import prepare_corpus
from tests.unit.corpus_samples import texts


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stdlib")
    rows = folder / "rows.jsonl"
    count = write_rows(rows, 600)
    tokenizer = train_tokenizer(rows, folder / "tokenizer", vocab_size=1024)
    return rows, count, tokenizer, prepare_corpus([rows], tokenizer, folder / "corpus")


def test_lengths_are_mixed(made):
    _, count, _, corpus = made
    assert len(corpus) == count == 600
    assert np.median(corpus.seq_lens) < 400
    assert (corpus.seq_lens > 4096).sum() >= 5
    assert corpus.vocab_size == 1024
    assert corpus.info["row_counts"]["rows_rejected"] == 0
    assert corpus.info["notes"] == []


def test_answers_are_trained_and_sources_are_whole(made):
    rows, _, tokenizer, corpus = made
    with rows.open() as file:
        for i, line in zip(range(50), file, strict=False):
            question, answer = (m["content"] for m in json.loads(line)["messages"])
            whole, trained = texts(corpus, tokenizer, i)
            assert whole == f"<|bos|><|user|>{question}<|end|><|assistant|>{answer}<|end|>"
            assert trained == f"{answer}<|end|>"
            if question.startswith("Write `def "):
                name = question.removeprefix("Write `def ").partition("(")[0]
                assert answer.startswith((f"def {name}", f"async def {name}"))


def test_tokenizer_is_the_same_every_time(made, tmp_path):
    rows = made[0]
    head = tmp_path / "rows.jsonl"
    head.write_text("".join(rows.read_text().splitlines(keepends=True)[:40]))
    folders = [train_tokenizer(head, tmp_path / name, vocab_size=400) for name in ("a", "b")]
    for file in sorted(folders[0].iterdir()):
        assert file.read_bytes() == (folders[1] / file.name).read_bytes()


def test_rows_of_a_small_library(tmp_path, monkeypatch):
    root = tmp_path / "lib"
    sources = {
        "plain.py": '"""Doc of plain."""\n\x0c\nclass C:\n    def f(self, x=1):\n        "Doc f."\n'
        "        return x\n\n    def hidden(self):\n        return 1\n",
        "package/__init__.py": '"""Doc of package."""\n',
        "package/deep.py": "@decorator\nasync def g(*a):\n    'Doc g.'\n",
        "test/test_x.py": '"""Skipped."""\n',
        "broken.py": "def (:\n",
        "latin.py": "# \u00e9\n",
    }
    for name, source in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        encoding = "latin-1" if name == "latin.py" else "utf-8"
        (root / name).write_bytes(source.encode(encoding))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"]
    assert [write_rows(paths[0]), write_rows(paths[1]), write_rows(paths[2], 2)] == [4, 4, 2]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    rows = [json.loads(line)["messages"] for line in paths[0].read_text().splitlines()]
    assert {question["content"]: answer["content"] for question, answer in rows} == {
        "Write `def f(self, x=1)` of plain.\n\nDoc f.": (
            'def f(self, x=1):\n    "Doc f."\n    return x'
        ),
        "Write `def g(*a)` of package.deep.\n\nDoc g.": "async def g(*a):\n    'Doc g.'",
        "Write the module plain: Doc of plain.": sources["plain.py"],
        "Write the module package: Doc of package.": sources["package/__init__.py"],
    }
