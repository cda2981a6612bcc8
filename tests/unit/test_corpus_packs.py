"""Rows all the way into packs: start, end and fill tokens, and what is trained of them."""

import json

import numpy as np
import pytest

from megatron_hbp.corpus.prepare import prepare_corpus
from megatron_hbp.corpus.tokenizer import load_tokenizer
from megatron_hbp.dataset import HbpDataset
from megatron_hbp.level import Level
from megatron_hbp.plan import DROP_UNTRAINABLE
from megatron_hbp.planner import build_plan
from tests.unit.corpus_samples import (
    CHATML,
    char_tokenizer,
    chat,
    decoder,
    prepare,
    rejects,
    write_rows,
)
from tests.unit.memory_corpus import one_pack_plan

NAMES = ["tt2k", "sp2k/tokenizer.model", "internlm2/tokenizer.model"]


def one_pack(corpus, tail=0):
    """(tokens, labels, weights, padding) of a pack with all sequences and `tail` tokens more."""
    pack_len = int(corpus.seq_lens.sum()) + tail
    item = HbpDataset(one_pack_plan(corpus, pack_len), corpus, 0)[0]
    return [
        item[name].numpy().reshape(-1)
        for name in ("tokens", "labels", "loss_weights", "padding_mask")
    ]


def real_rows(shared_data, file, count):
    lines = (shared_data / "messages" / f"{file}.jsonl").read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:count]]


@pytest.mark.parametrize("name", NAMES)
def test_br_c07_one_start_token_per_document_of_a_pack(tmp_path, shared_data, name):
    path = shared_data / "tokenizer" / name
    corpus = prepare(tmp_path, real_rows(shared_data, "glaive_toolcall_en", 6), path)
    start = load_tokenizer(path).start_id
    assert all((corpus.tokens(i) == start).sum() == 1 for i in range(6))
    tokens, _, weights, padding = one_pack(corpus)
    starts = np.flatnonzero(tokens == start)
    assert starts.tolist() == [0, *np.cumsum(corpus.seq_lens)[:-1].tolist()]
    assert not padding.any()
    assert not weights[starts[1:] - 1].any()  # no document is to foretell the next one


@pytest.mark.parametrize("adds_start", [True, False])
def test_br_c07_a_tokenizer_that_adds_one_and_a_template_that_prints_one(tmp_path, adds_start):
    tokenizer = char_tokenizer(tmp_path / "t", adds_start=adds_start)
    corpus = prepare(tmp_path, [chat("ua"), chat("suaua"), chat("aua")], tokenizer)
    tokens, *_ = one_pack(corpus)
    assert (tokens == load_tokenizer(tokenizer).start_id).sum() == 3


@pytest.mark.parametrize("pad", ["</s>", "<|im_end|>", None])
def test_br_c08_end_tokens_of_a_pack_are_trained_whatever_the_pad_id(tmp_path, pad):
    """Pad id == end id, pad id == another trained token, and none."""
    template = CHATML.replace("<|im_end|>", "</s>")
    tokenizer = char_tokenizer(tmp_path / "t", template=template, pad_token=pad)
    corpus = prepare(tmp_path, [chat("ua"), chat("ua"), chat("ua")], tokenizer)
    _, labels, weights, padding = one_pack(corpus, tail=4)
    assert ((labels == corpus.end_id) & (weights > 0)).sum() == 3
    assert padding.sum() == 4
    assert padding[-4:].all()
    assert not weights[-4:].any()


@pytest.mark.parametrize("name", ["sp2k", "internlm2"])
def test_br_c09_a_tail_without_a_pad_id(tmp_path, shared_data, name):
    path = shared_data / "tokenizer" / name / "tokenizer.model"
    loaded = load_tokenizer(path)
    assert "pad_token" not in loaded.variables
    rows = real_rows(shared_data, "glaive_toolcall_zh", 4)
    corpus = prepare(tmp_path, rows, path)
    tokens, labels, weights, padding = one_pack(corpus, tail=5)
    assert tokens.min() >= 0
    assert tokens.max() < corpus.vocab_size
    assert padding.sum() == 5
    assert not weights[padding].any()
    trained = sum(int(corpus.mask(i)[1:].sum()) for i in range(4))
    assert (weights > 0).sum() == trained
    zeros = sum(int(((corpus.tokens(i) == 0) & (corpus.mask(i) == 1)).sum()) for i in range(4))
    assert ((labels == 0) & (weights > 0)).sum() == zeros
    assert (zeros > 0) == (name == "sp2k")  # which has the unknown token for what it cannot spell


def long_prompts(tmp_path):
    """Answers of 10 after 2048 and after 2043 tokens, of which 20 are the template's."""
    texts = ["p" * (2048 - 20), "p" * (2048 - 25)]
    return write_rows(tmp_path / "rows.jsonl", [chat("ua", [text, "a" * 10]) for text in texts])


def test_br_b03_a_prompt_longer_than_the_limit_is_dropped_by_prepare(tmp_path):
    tokenizer = char_tokenizer(tmp_path / "t")
    rows = long_prompts(tmp_path)
    corpus = prepare_corpus([rows], tokenizer, tmp_path / "c", max_length=2048, overlong="truncate")
    (first, reason), *others = rejects(corpus)
    assert (first, reason.startswith("no trainable token")) == (1, True)
    assert len(corpus) == 1
    assert corpus.seq_lens.tolist() == [2048]
    assert corpus.mask(0).sum() == 5
    assert [line for line, _ in others] == [2]


def test_br_b03_a_prompt_longer_than_the_level_is_dropped_by_the_plan(tmp_path):
    tokenizer = char_tokenizer(tmp_path / "t")
    corpus = prepare_corpus([long_prompts(tmp_path)], tokenizer, tmp_path / "c")
    assert corpus.first_trained[0] >= 2048 > corpus.first_trained[1]
    plan = build_plan(
        corpus.seq_lens,
        [Level(2048, 1)],
        1,
        overlong="truncate",
        first_trained=corpus.first_trained,
    )
    assert plan.dropped_ids.tolist() == [0]
    assert plan.dropped_reason.tolist() == [DROP_UNTRAINABLE]
    assert plan.truncated_ids.tolist() == [1]
    item = HbpDataset(plan, corpus, 0)[0]
    assert item["num_trained"] == (item["loss_weights"] > 0).sum() == 5


def test_br_b08_the_first_token_of_each_answer_is_a_label(tmp_path):
    """Answer tokens and end are the trained labels, one by one, in packs as in rows."""
    tokenizer = char_tokenizer(tmp_path / "t")
    rows = [chat("uaua", ["q", "first", "q", "second"]), chat("ua", ["q", "x"])]
    corpus = prepare(tmp_path, rows, tokenizer)
    _, labels, weights, _ = one_pack(corpus)
    trained = labels[weights > 0]
    assert decoder(tokenizer)(trained) == "first<|im_end|>second<|im_end|>x<|im_end|>"


def test_br_b01_no_row_without_a_trained_token_reaches_a_plan(tmp_path):
    """Answers of nothing, of white space, marked as context; a chat that ends before an answer."""
    rows = [
        chat("ua", ["q", ""]),
        chat("ua", ["q", " \n"]),
        chat("ua", ["q", None]),
        chat("u"),
        chat("ua"),
    ]
    rows[2]["messages"][1]["tool_calls"] = []
    marked = chat("ua")
    marked["messages"][1]["loss"] = False
    corpus = prepare(tmp_path, [*rows, marked], char_tokenizer(tmp_path / "t"))
    assert [line for line, _ in rejects(corpus)] == [1, 2, 3, 4, 6]
    assert (corpus.num_trained > 0).all()
    assert len(corpus) == 1
