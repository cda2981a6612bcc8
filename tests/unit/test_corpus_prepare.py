"""`hbp prepare`: counts, reasons, strict mode, outputs left alone or refused, the held-out part."""

import argparse
import json
import tracemalloc

import numpy as np
import pytest

from megatron_hbp.commands.prepare import add_command
from megatron_hbp.corpus import Corpus, preparation
from megatron_hbp.corpus import prepare as prepare_module
from tests.unit.corpus_samples import (
    CHATML,
    char_tokenizer,
    chat,
    prepare,
    rejects,
    texts,
    write_rows,
)


@pytest.fixture
def tokenizer(tmp_path):
    return char_tokenizer(tmp_path / "tokenizer")


def lossy(corpus):
    counts = corpus.info["row_counts"]
    assert counts["rows_in"] == counts["rows_kept"] + counts["rows_rejected"]
    return counts["rows_kept"], counts["reasons"]


def test_br_a05_every_dropped_row_has_a_reason(tmp_path, tokenizer):
    rows = [chat(roles) for roles in ("uua", "au", "u", "sua", "ua")]
    corpus = prepare(tmp_path, rows, tokenizer)
    assert lossy(corpus) == (4, {"no answer": 1})
    assert rejects(corpus) == [(3, "no answer: no message has the role assistant")]


def test_br_a05_all_rows_dropped_is_an_error(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"all 3 rows were lost: no answer 2, unknown role 1"):
        prepare(tmp_path, [chat("u"), chat("xa"), chat("u")], tokenizer)
    assert not (tmp_path / "corpus").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_br_c04_role_orders(tmp_path, tokenizer):
    rows = [chat(roles) for roles in ("ua", "uua", "aua", "suata", "xa", "")]
    corpus = prepare(tmp_path, rows, tokenizer)
    assert lossy(corpus) == (4, {"no messages": 1, "unknown role": 1})
    assert rejects(corpus) == [(5, "unknown role critic of message 1"), (6, "no messages")]
    assert texts(corpus, tokenizer, 2)[1] == "a0<|im_end|>a2<|im_end|>"
    with pytest.raises(ValueError, match=r"strict\.jsonl:5: unknown role critic.*--strict"):
        prepare(tmp_path, rows, tokenizer, "strict", strict=True)


def test_br_c04_a_template_that_refuses_an_order(tmp_path):
    template = (
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('user first') }}{% endif %}"
        + CHATML
    )
    tokenizer = char_tokenizer(tmp_path / "t", template=template)
    corpus = prepare(tmp_path, [chat("ua"), chat("aua")], tokenizer)
    assert lossy(corpus) == (1, {"chat template": 1})
    assert rejects(corpus) == [(2, "chat template: user first")]


@pytest.mark.parametrize("name", ["glaive_toolcall_en", "glaive_toolcall_zh"])
def test_br_c05_tool_files_keep_all_rows(tmp_path, shared_data, tokenizer, name):
    path = shared_data / "messages" / f"{name}.jsonl"
    corpus = prepare(tmp_path, path, tokenizer)
    rows = [json.loads(line) for line in path.read_text().split("\n") if line]
    assert lossy(corpus) == (len(rows), {})
    for i, row in list(enumerate(rows))[:60]:
        whole, trained = texts(corpus, tokenizer, i)
        answers = [m for m in row["messages"] if m["role"] == "assistant"]
        assert trained.count("<|im_end|>") == len(answers)
        for message in row["messages"]:
            if message["role"] == "tool":
                assert message["content"] in whole
                assert message["content"] not in trained
            elif message.get("tool_calls"):
                assert json.dumps(message["tool_calls"][0], ensure_ascii=False) in trained


def test_br_c05_rows_7_to_12(tmp_path, shared_data, tokenizer):
    lines = (shared_data / "messages" / "xtuner_tools_think.jsonl").read_text().split("\n")
    rows = [json.loads(line) for line in lines[6:12]]
    corpus = prepare(tmp_path, rows, tokenizer)
    assert lossy(corpus) == (6, {})
    for i, row in enumerate(rows):
        assert row["tools"][0]["function"]["name"] in texts(corpus, tokenizer, i)[0]
        trained = texts(corpus, tokenizer, i)[1].removesuffix("<|im_end|>").split("<|im_end|>")
        expected = [
            m["content"]
            + "".join(json.dumps(c, ensure_ascii=False) for c in m.get("tool_calls", []))
            for m in row["messages"]
            if m["role"] == "assistant" and m.get("loss", True)
        ]
        assert trained == expected


def test_br_c05_tools_as_json_text(tmp_path, tokenizer):
    tools = [{"type": "function", "function": {"name": "w"}}]
    rows = [chat("uata", tools=tools), chat("uata", tools=json.dumps(tools))]
    corpus = prepare(tmp_path, rows, tokenizer)
    assert corpus.tokens(0).tolist() == corpus.tokens(1).tolist()
    assert '"name": "w"' in texts(corpus, tokenizer)[0]


def test_br_c06_null_missing_and_empty_content(tmp_path, tokenizer):
    call = {"type": "function", "function": {"name": "w", "arguments": {"c": "X"}}}
    rows = [chat("uata", ["q", content, "r", "done"]) for content in (None, "", "remove")]
    for row in rows:
        row["messages"][1]["tool_calls"] = [call]
    del rows[2]["messages"][1]["content"]
    corpus = prepare(tmp_path, rows, tokenizer)
    for i in (1, 2):
        np.testing.assert_array_equal(corpus.tokens(i), corpus.tokens(0))
        np.testing.assert_array_equal(corpus.mask(i), corpus.mask(0))
    assert texts(corpus, tokenizer)[1].startswith('{"type": "function"')


def test_br_m03_empty_file(tmp_path, tokenizer):
    empty, blank = tmp_path / "empty.jsonl", tmp_path / "blank.jsonl"
    empty.touch()
    blank.write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty; give files with"):
        prepare(tmp_path, empty, tokenizer)
    with pytest.raises(ValueError, match=r"blank\.jsonl: no row at all"):
        prepare(tmp_path, blank, tokenizer)
    with pytest.raises(ValueError, match=r"nothing does not exist"):
        prepare(tmp_path, tmp_path / "nothing", tokenizer)


def test_reject_lines_name_their_file(tmp_path, tokenizer):
    files = [write_rows(tmp_path / f"{n}.jsonl", [chat("ua"), chat("u")]) for n in "ab"]
    files[1].write_text("\n\n" + files[1].read_text())
    corpus = prepare_module.prepare_corpus(files, tokenizer, tmp_path / "c")
    entries = [
        json.loads(line) for line in (corpus.path / "rejects.jsonl").read_text().split("\n")[:2]
    ]
    assert [(e["file"], e["line"]) for e in entries] == [(str(files[0]), 2), (str(files[1]), 4)]
    assert corpus.info["row_counts"]["blank_lines"] == 2
    assert len(corpus) == 2


def test_rows_keep_their_order_over_batches(tmp_path, tokenizer, monkeypatch):
    rows = [chat("ua", ["q", f"answer {i}"]) if i % 5 else chat("u") for i in range(40)]
    whole = prepare(tmp_path, rows, tokenizer)
    monkeypatch.setattr(preparation, "_BLOCK_BYTES", 300)
    small = prepare(tmp_path, rows, tokenizer, "small")
    assert small.hash == whole.hash
    answers = [texts(small, tokenizer, i)[1].removesuffix("<|im_end|>") for i in range(len(small))]
    assert answers == [f"answer {i}" for i in range(40) if i % 5]


def test_same_inputs_are_left_alone_others_refused(tmp_path, tokenizer):
    rows = [chat("ua", ["q", f"a{i}"]) for i in range(9)]
    template = tmp_path / "template.jinja"
    template.write_text(CHATML)
    source = write_rows(tmp_path / "rows.jsonl", rows)

    def make(**options):
        options = {"chat_template": template, "valid_share": 0.4} | options
        return prepare_module.prepare_corpus([source], tokenizer, tmp_path / "c", **options)

    first = make()
    stamps = {file: file.stat().st_mtime_ns for file in first.path.rglob("*")}
    assert make().hash == first.hash
    assert make(strict=True).hash == first.hash
    assert {file: file.stat().st_mtime_ns for file in first.path.rglob("*")} == stamps

    def refused(what):
        text = rf"exists and is not this corpus \(other {what}\); name another folder or remove it"
        return pytest.raises(ValueError, match=text)

    with refused("valid seed"):
        make(valid_seed=1)
    with refused("valid share, valid seed"):
        make(valid_share=0.0)
    assert make(chat_template=None).hash == first.hash  # the tokenizer's own is the same text
    template.write_text(CHATML + " ")
    with refused("chat template hash"):
        make()
    template.write_text(CHATML)
    make()
    content = source.read_bytes()
    source.write_bytes(content.replace(b"a8", b"a9"))
    with refused("input hashes"):
        make()
    source.write_bytes(content)
    make()
    char_tokenizer(tokenizer, adds_start=True)
    with refused("tokenizer hashes"):
        make()


def test_br_k04_a_half_file_is_not_taken_for_the_output(tmp_path, tokenizer):
    corpus = prepare(tmp_path, [chat("ua")], tokenizer)
    file = corpus.path / "tokens.idx"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match="exists and is not this corpus"):
        prepare(tmp_path, [chat("ua")], tokenizer)
    with pytest.raises(ValueError, match=r"damaged .tokens\.idx has"):
        Corpus.open(corpus.path)


def test_held_out_rows(tmp_path, tokenizer):
    rows = [chat("ua", ["q", f"answer {i % 50}"]) for i in range(100)]
    corpus = prepare(tmp_path, rows, tokenizer, valid_share=0.2)
    valid = Corpus.open(corpus.path / "valid", verify=True)
    whole = prepare(tmp_path, rows, tokenizer, "whole")

    def answers(part):
        return [part.tokens(i).tobytes() for i in range(len(part))]

    assert len(corpus) + len(valid) == 100
    assert 8 <= len(valid) <= 36
    assert not set(answers(corpus)) & set(answers(valid))  # equal rows stay together
    assert sorted(answers(corpus) + answers(valid)) == sorted(answers(whole))
    assert corpus.info["row_counts"]["rows_held_out"] == len(valid)
    other = prepare(tmp_path, rows, tokenizer, "other", valid_share=0.2, valid_seed=1)
    assert answers(other) != answers(corpus)


def test_held_out_shares_that_cannot_be(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="puts 0 of 1 rows into the valid corpus; change"):
        prepare(tmp_path, [chat("ua")], tokenizer, valid_share=0.01)
    for share in (0.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"it must be at least 0 and below 0\.5"):
            prepare(tmp_path, [chat("ua")], tokenizer, valid_share=share)


def test_memory_does_not_grow_with_the_rows(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(preparation, "_BLOCK_BYTES", 1 << 15)
    prepare(tmp_path, [chat("ua")], tokenizer, "warm-up")
    peaks = []
    for count in (50, 400):
        rows = [chat("ua", ["q" * 2000, f"answer {i}"]) for i in range(count)]
        path = write_rows(tmp_path / f"{count}.jsonl", rows)
        del rows
        tracemalloc.start()
        prepare(tmp_path, path, tokenizer, str(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


def run(*arguments):
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(required=True))
    namespace = parser.parse_args(["prepare", *map(str, arguments)])
    return namespace.func(namespace)


def test_command(tmp_path, tokenizer, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [chat("ua", ["q" * 300, "a" * 9]), chat("u")])
    more = write_rows(tmp_path / "more.jsonl", [chat("ua")])
    output = tmp_path / "c"
    assert run("--input", rows, "--input", more, "--tokenizer", tokenizer, "--output", output) == 0
    printed = capsys.readouterr().out
    assert "rows        3 in = 2 kept + 1 rejected" in printed
    assert "reason    1  no answer" in printed
    assert "trained     13 of" in printed
    assert "template    the tokenizer's own" in printed
    assert "p50 " in printed
    assert f"rows that lost something are listed in {output}/rejects.jsonl" in printed
    assert len(Corpus.open(output)) == 2
    assert run("--input", rows, more, "--tokenizer", tokenizer, "--output", output) == 0
    assert capsys.readouterr().out == printed


def test_command_errors_are_one_line(tmp_path, tokenizer):
    rows = write_rows(tmp_path / "rows.jsonl", [chat("ua"), chat("u")])
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: no answer") as error:
        run("--input", rows, "--tokenizer", tokenizer, "--output", tmp_path / "c", "--strict")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"tokenizer .*missing does not exist; give") as error:
        run("--input", rows, "--tokenizer", tmp_path / "missing", "--output", tmp_path / "c")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"chat template .*missing\.jinja cannot be read"):
        run("--input", rows, "--tokenizer", tokenizer, "--output", tmp_path / "c",
            "--chat-template", tmp_path / "missing.jinja")  # fmt: skip


def test_the_built_in_template_is_named(tmp_path):
    tokenizer = char_tokenizer(tmp_path / "t", template=None)
    corpus = prepare(tmp_path, [chat("ua")], tokenizer)
    assert corpus.info["chat_template"].startswith("built-in (the tokenizer has none)")
    assert corpus.tokenizer_path == str(tokenizer)


def test_other_templates_of_the_tokenizer_are_named(tmp_path):
    folder = char_tokenizer(tmp_path / "t")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": CHATML},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    corpus = prepare(tmp_path, [chat("ua")], folder)
    assert corpus.info["notes"][0] == "the tokenizer's other chat templates (tool_use) are not used"
