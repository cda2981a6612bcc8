"""Rows: one form from many, and a reason for each one that cannot be used."""

import json

import pytest

from megatron_hbp.corpus.rows import RowError, parse_row, read_lines


def parse(row):
    return parse_row(json.dumps(row).encode())


def reason(line: bytes) -> str:
    with pytest.raises(RowError) as error:
        parse_row(line)
    return str(error.value)


def test_br_m01_rows_are_split_at_lf_only(tmp_path):
    inside = "x\u2028y\u2029z\u0085w\u000b"
    rows = [json.dumps({"messages": [text]}, ensure_ascii=False) for text in ("a", inside, "b")]
    assert "\u2028" in rows[1]
    for end, last in (("\n", "\n"), ("\r\n", "\r\n"), ("\n", "")):
        path = tmp_path / "rows.jsonl"
        path.write_bytes((end.join(rows) + last).encode())
        lines = list(read_lines(path))
        assert [number for number, _ in lines] == [1, 2, 3]
        assert [line.decode() for _, line in lines] == rows


def test_blank_lines_keep_their_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n\n \t\r\n{}\n")
    assert list(read_lines(path)) == [(1, b"{}"), (2, b""), (3, b""), (4, b"{}")]


def test_lone_surrogates_become_replacement_characters():
    line = b'{"messages": [{"role": "assistant", "content": "\\ud800 \\ud83d\\ude00 \\udfff"}]}'
    assert parse_row(line).messages[0]["content"] == "\ufffd \U0001f600 \ufffd"


@pytest.mark.parametrize("content", [None, "", []])
def test_no_content_is_one_thing(content):
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    row = {"messages": [{"role": "assistant", "content": content, "tool_calls": [call]}]}
    missing = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    assert parse(row) == parse(missing)
    assert parse(row).trained == [True]


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    assert parse({"messages": [{"role": "assistant", "content": parts}]}).messages[0][
        "content"
    ] == ("abc")


def test_br_m04_other_key_names():
    chat = parse(
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    )
    assert [(m["role"], m["content"]) for m in chat.messages] == [
        ("user", "hi"),
        ("assistant", "yo"),
    ]
    assert reason(b'{"id": 7}') == "expected messages, found id"
    assert reason(b'{"id": 7, "text": ""}') == "expected messages, found id, text"
    assert reason(b"{}") == "expected messages, found no key"


def test_sharegpt_tool_names_are_mapped():
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    chat = parse(
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": call},
                {"from": "observation", "value": "r"},
                {"from": "function_call", "value": "in words"},
            ]
        }
    )
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert chat.messages[3]["content"] == "in words"


def test_tools_as_list_or_json_text():
    messages = [{"role": "assistant", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parse({"messages": messages, "tools": tools}).tools == tools
    assert parse({"messages": messages, "tools": json.dumps(tools)}).tools == tools
    for nothing in (None, [], "", " "):
        assert parse({"messages": messages, "tools": nothing}).tools is None


def test_answers_marked_as_context_are_not_trained():
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "loss": False},
        {"role": "assistant", "content": " "},
        {"role": "assistant", "content": "b", "loss": True},
    ]
    chat = parse({"messages": messages})
    assert chat.trained == [False, False, False, True]
    assert all("loss" not in message for message in chat.messages)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"messages":[{"role":"user","content":"cut', "not JSON: Unterminated string"),
        (b'INFO: {"messages":[]}', "not JSON: Expecting value"),
        (b'{"messages": ["\xff"]}', "not UTF-8: byte 15 of the row"),
        (b"[" * 200_000, "not JSON"),
        (b'{"messages": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[1]", "expected an object, found a list"),
        (b"null", "expected an object, found null"),
        (b'{"messages": []}', "no messages"),
        (b'{"messages": "text"}', "messages is text, not a list"),
        (b'{"messages": [1]}', "message 1 is a number, not an object"),
        (b'{"messages": [{"role": "critic"}]}', "unknown role critic of message 1"),
        (b'{"messages": [{"content": "x"}]}', "unknown role None of message 1"),
        (b'{"messages": [{"role": ["user"]}]}', "unknown role"),
        (b'{"messages": [{"role": "user", "content": "q"}]}', "no answer"),
        (b'{"messages": [{"role": "user", "content": 7}]}', "content of message 1 is a number"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "unsupported content part image in message 1",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "", "tool_calls": {"a": 1}}]}',
            "tool_calls of message 1 is not a list",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "a"}], "tools": {"a": 1}}',
            "tools is an object, not a list",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "a"}], "tools": "x"}',
            "tools is neither a list nor JSON",
        ),
    ],
)
def test_reasons(line, expected):
    assert reason(line).startswith(expected)
