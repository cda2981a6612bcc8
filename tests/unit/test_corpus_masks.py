"""Masks against expectations written by hand: the exact list of trained texts of a row.

Answers of real rows are read from the raw JSON, by index; nothing here calls the template code.
"""

import json

import numpy as np
import pytest

from megatron_hbp.corpus.tokenizer import Place, load_tokenizer
from tests.unit.corpus_samples import CHATML, char_tokenizer, prepare
from tests.unit.corpus_templates import (
    DEEPSEEK2,
    LLAMA3,
    MISTRAL,
    REASONING,
    raw_rows,
    trained,
    trained_texts,
    with_blocks,
)

END = "<|im_end|>"


@pytest.fixture
def real(shared_data):
    """real(file, line): the row, from messages/ or edge/."""

    def row(name, line):
        path = shared_data / "messages" / f"{name}.jsonl"
        if not path.exists():
            path = shared_data / "edge" / f"{name}.jsonl"
        lines = path.read_bytes().split(b"\n")
        return json.loads(lines[line - 1])

    return row


def said(row, *indices):
    return [row["messages"][i]["content"] + END for i in indices]


def test_row_01_plain(tmp_path, real):
    assert trained(tmp_path, real("edge_cases", 1)) == ["plain answer<|im_end|>"]


def test_row_02_line_separators(tmp_path, real):
    assert trained(tmp_path, real("edge_cases", 2)) == ["a\u2028b<|im_end|>"]


def test_row_03_sharegpt(tmp_path, real):
    assert trained(tmp_path, real("edge_cases", 7)) == ["yo<|im_end|>"]


def test_row_04_the_assistant_starts(tmp_path, real):
    row = real("edge_cases", 11)
    assert trained(tmp_path, row) == ["I start<|im_end|>", "c<|im_end|>"]
    assert trained(tmp_path, row, LLAMA3) == ["I start</s>", "c</s>"]
    assert trained(tmp_path, row, MISTRAL) == [" I start</s>", " c</s>"]
    assert trained(tmp_path, row, DEEPSEEK2) == [" I start</s>", " c</s>"]


def test_row_05_a_call_without_content(tmp_path, real):
    call = '{"type": "function", "function": {"name": "w", "arguments": {"c": "X"}}}'
    for line in (12, 13):
        row = real("edge_cases", line)
        assert trained(tmp_path, row) == [f"{call}<|im_end|>", "one degree<|im_end|>"]
        assert trained(tmp_path, row, LLAMA3) == [
            '{"name": "w", "arguments": {"c": "X"}}</s>',
            "one degree</s>",
        ]


def test_row_06_control_text_in_the_question(tmp_path, real):
    assert trained(tmp_path, real("edge_cases", 16)) == ["ok<|im_end|>"]


def test_row_07_a_long_answer(tmp_path, real):
    row = real("edge_cases", 18)
    assert len(row["messages"][1]["content"]) > 50_000
    assert trained(tmp_path, row) == said(row, 1)
    assert len(trained(tmp_path, row)[0]) == len(row["messages"][1]["content"]) + 10


def test_row_08_an_empty_system_turn(tmp_path, real):
    for template, expected in ((CHATML, "b<|im_end|>"), (LLAMA3, "b</s>"), (DEEPSEEK2, " b</s>")):
        assert trained(tmp_path, real("edge_cases", 19), template) == [expected]


def test_row_09_one_turn_of_several_lines(tmp_path, real):
    row = real("gsm8k_test", 1)
    (text,) = trained(tmp_path, row)
    assert text.startswith("Janet sells 16")
    assert text.endswith("\n#### 18<|im_end|>")
    assert [text] == said(row, 1)


def test_row_10_two_turns(tmp_path, real):
    first, second = trained(tmp_path, real("fastchat_dummy", 1))
    assert first.startswith("I am Vicuna, a language model trained by")
    assert first.endswith("(LMSYS).<|im_end|>")
    assert second == "You too!<|im_end|>"


def test_row_11_six_turns(tmp_path, real):
    row = real("axolotl_fixtures", 1)
    assert trained(tmp_path, row) == said(row, 1, 3, 5, 7, 9, 11)


def test_row_12_answers_that_say_nothing(tmp_path, real):
    row = real("axolotl_fixtures", 2)
    spoken = [i for i in (1, 3, 5, 7, 9, 11) if row["messages"][i]["content"]]
    assert 1 not in spoken
    assert trained(tmp_path, row) == said(row, *spoken)


def test_row_13_english_tool_calls(tmp_path, real):
    row = real("glaive_toolcall_en", 1)
    first, call, result, last = trained(tmp_path, row)
    assert [first, result, last] == said(row, 1, 5, 7)
    assert call == (
        '{"type": "function", "function": {"name": "search_recipes", "arguments": '
        '{"ingredients": ["chicken", "bell peppers", "rice"]}}}<|im_end|>'
    )


def test_row_14_chinese_tool_calls(tmp_path, real):
    row = real("glaive_toolcall_zh", 1)
    call, answer = trained(tmp_path, row)
    assert call.startswith('{"type": "function", "function": {"name": "generate_invoice"')
    assert '"name": "\u82f9\u679c", "quantity": 2, "price": 1}' in call
    assert call.endswith("}}}<|im_end|>")
    assert [answer] == said(row, 3)


def test_row_15_reasoning(tmp_path, real):
    row = real("xtuner_tools_think", 3)
    reasoning = row["messages"][2]["reasoning_content"]
    assert reasoning == reasoning.strip().join("\n\n")
    content = row["messages"][2]["content"]
    assert trained(tmp_path, row, REASONING) == [
        f"<think>\n{reasoning}\n</think>\n\n{content}<|im_end|>"
    ]
    assert trained(tmp_path, row) == [f"{content}<|im_end|>"]


def test_row_16_an_answer_marked_as_context(tmp_path, real):
    row = real("xtuner_tools_think", 4)
    assert row["messages"][2]["loss"] is False
    assert trained(tmp_path, row) == said(row, 4)
    assert trained(tmp_path, row, with_blocks(CHATML)) == said(row, 4)
    assert trained(tmp_path, row, REASONING) == ["<think>\n\n</think>\n\n" + said(row, 4)[0]]


def test_row_17_reasoning_of_earlier_answers_is_dropped(tmp_path, real):
    row = real("xtuner_tools_think", 6)
    last = row["messages"][6]
    assert trained(tmp_path, row, REASONING) == [
        *said(row, 2, 4),
        f"<think>\n{last['reasoning_content']}\n</think>\n\n{last['content']}<|im_end|>",
    ]


WEATHER = '{"name": "get_weather", "arguments": {"location": "%s"}}'


def test_row_18_a_call_with_content_and_reasoning(tmp_path, real):
    row = real("xtuner_tools_think", 9)
    call, last = row["messages"][2], row["messages"][4]
    assert trained(tmp_path, row, REASONING) == [
        f"<think>\n{call['reasoning_content']}\n</think>\n\n{call['content']}"
        f"\n<call>{WEATHER % 'Boston'}</call><|im_end|>",
        f"<think>\n{last['reasoning_content']}\n</think>\n\n{last['content']}<|im_end|>",
    ]


def test_row_19_two_calls_and_one_answer_as_context(tmp_path, real):
    row = real("xtuner_tools_think", 10)
    messages = row["messages"]
    whole = '{"id": "%s", "type": "function", "function": %s}<|im_end|>'
    assert trained(tmp_path, row) == [
        messages[2]["content"] + whole % ("call_123", WEATHER % "Boston"),
        messages[6]["content"] + whole % ("call_789", WEATHER % "shanghai"),
        messages[8]["content"] + END,
    ]


def test_row_20_calls_with_reasoning_before_another_question(tmp_path, real):
    """The reasoning of the first loop of calls is gone once the second question is there."""
    row = real("xtuner_tools_think", 12)
    messages = row["messages"]
    assert trained(tmp_path, row, REASONING) == [
        f"{messages[2]['content']}\n<call>{WEATHER % 'Boston'}</call><|im_end|>",
        f"{messages[4]['content']}<|im_end|>",
        f"<think>\n{messages[6]['reasoning_content']}\n</think>\n\n{messages[6]['content']}"
        f"\n<call>{WEATHER % 'shanghai'}</call><|im_end|>",
        f"<think>\n\n</think>\n\n{messages[8]['content']}<|im_end|>",
    ]


REAL_FILES = [
    "glaive_toolcall_en", "glaive_toolcall_zh", "gsm8k_test", "fastchat_dummy",
    "self_instruct_seed", "mixed_long_short", "qmsum_spans", "axolotl_fixtures",
]  # fmt: skip


def said_by_hand(message, template):
    """What an answer looks like in a template, end token included; None when it is not trained."""
    calls = message.get("tool_calls") or []
    content = message["content"] or ""
    if message["role"] != "assistant" or message.get("loss", True) is False:
        return None
    if template == LLAMA3:
        text = content.strip() + "".join(
            json.dumps(call["function"], ensure_ascii=False) for call in calls
        )
        return f"{text}</s>" if text else None
    text = content + "".join(json.dumps(call, ensure_ascii=False) for call in calls)
    return f"{text}<|im_end|>" if text.strip() else None


@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["chatml", "llama3"])
@pytest.mark.parametrize("name", REAL_FILES)
def test_real_rows(tmp_path, shared_data, name, template):
    rows = raw_rows(shared_data / "messages" / f"{name}.jsonl")
    rows = [row for row in rows[::9] if len(json.dumps(row)) < 40_000]
    tokenizer = char_tokenizer(tmp_path / "t", template=template)
    corpus = prepare(tmp_path, rows, tokenizer)
    blocks = char_tokenizer(tmp_path / "b", template=with_blocks(template))
    marked = prepare(tmp_path, rows, blocks, "marked")
    assert len(corpus) == len(marked) == len(rows)
    for i, row in enumerate(rows):
        expected = [said_by_hand(message, template) for message in row["messages"]]
        expected = [text for text in expected if text is not None]
        assert trained_texts(corpus, tokenizer, i) == expected
        np.testing.assert_array_equal(corpus.tokens(i), marked.tokens(i))
        np.testing.assert_array_equal(corpus.mask(i), marked.mask(i))


@pytest.mark.parametrize("name", ["tt2k", "sp2k/tokenizer.model", "internlm2/tokenizer.model"])
@pytest.mark.parametrize("file", ["fastchat_dummy", "glaive_toolcall_zh", "gsm8k_test"])
def test_trained_tokens_of_real_tokenizers(tmp_path, shared_data, name, file):
    """The trained ids of each answer are those of its text alone, and the end token."""
    path = shared_data / "tokenizer" / name
    loaded = load_tokenizer(path)
    rows = raw_rows(shared_data / "messages" / f"{file}.jsonl")[:60]
    corpus = prepare(tmp_path, rows, path)
    assert len(corpus) == len(rows)
    for i, row in enumerate(rows):
        expected = []
        for message in row["messages"]:
            calls = message.get("tool_calls") or []
            text = message["content"] or ""
            if calls and name != "tt2k":  # whose own template does not print calls
                text += json.dumps(calls, ensure_ascii=False)
            if message["role"] == "assistant" and text.strip():
                expected += [*loaded.encode([text], [Place.AFTER_TEXT])[0], loaded.end_id]
        assert corpus.tokens(i)[corpus.mask(i) == 1].tolist() == expected
