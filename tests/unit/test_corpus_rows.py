"""Rows: one form from many, and a reason for each one that cannot be used."""

import contextlib
import json
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hbp.corpus.row_values import OddValue
from megatron_hbp.corpus.rows import (
    DETECT,
    MASKS,
    PAIRS,
    Chat,
    Passage,
    RowError,
    RowKeys,
    TokenRow,
    known_keys,
    parse_row,
)
from tests.unit.corpus_samples import chat


def parse(row, keys=DETECT):
    return parse_row(json.dumps(row).encode(), keys)


def reason(row: bytes | dict, keys=DETECT) -> str:
    with pytest.raises(RowError) as error:
        parse_row(row, keys)
    assert len(error.value.kind) < 60
    return str(error.value)


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
        {"role": "assistant", "content": "c", "loss": 0},
        {"role": "assistant", "content": "d", "loss": None},
    ]
    chat = parse({"messages": messages})
    assert chat.trained == [False, False, False, True, False, True]
    assert all("loss" not in message for message in chat.messages)
    messages[1]["loss"] = "false"
    assert reason({"messages": messages}) == "loss false of an answer is neither true nor false"


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


def turns(*pairs) -> list[dict]:
    return [{"role": role, "content": content} for role, content in pairs]


QUESTION_ANSWER = turns(("user", "q"), ("assistant", "a"))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.prompt}+{pair.completion}")
def test_every_known_pair_of_keys_is_a_question_and_an_answer(pair):
    row = {"id": 1, pair.prompt: "q", pair.completion: "a", "messages": None}
    chat = parse(row)
    assert chat == Chat(QUESTION_ANSWER, None, [False, True])
    for key in pair.contexts:
        assert parse({**row, key: "more"}).messages[0]["content"] == "q\n\nmore"
        assert parse({**row, key: ""}) == parse({**row, key: None}) == chat
        assert parse({**row, key: "more", pair.prompt: " "}).messages[0]["content"] == "more"
        assert reason({**row, key: {"a": 1}}) == f"{key} is an object, not text"
    assert reason({**row, pair.completion: " \n"}) == f"no answer: {pair.completion} is empty"
    assert reason({**row, pair.prompt: ""}) == f"no prompt: {pair.prompt} is empty"
    assert reason({**row, pair.completion: 42}) == f"{pair.completion} is a number, not text"
    assert reason({**row, pair.prompt: {}}) == f"{pair.prompt} is an object, not text"
    assert reason({pair.prompt: "q", "id": 1}) == f"expected messages, found {pair.prompt}, id"


def test_forms_are_taken_in_order():
    tokens = {"input_ids": [1, 2], "labels": [1, 2]}
    pair = {"prompt": "q", "completion": "a"}
    messages = {"messages": turns(("assistant", "m"))}
    assert parse({**tokens, **pair, **messages, "text": "t"}).messages == messages["messages"]
    assert parse({**tokens, **pair, "text": "t"}).messages == QUESTION_ANSWER
    assert isinstance(parse({**tokens, "text": "t"}), TokenRow)
    assert reason({"text": "t"}) == "expected messages, found text"
    alpaca = {"instruction": "i", "output": "o", "prompt": "all of it, rendered"}
    assert parse(alpaca).messages == turns(("user", "i"), ("assistant", "o"))


@pytest.mark.parametrize("key", ["messages", "conversations", "conversation"])
def test_names_of_a_list_of_messages(key):
    assert parse({key: QUESTION_ANSWER}) == Chat(QUESTION_ANSWER, None, [False, True])
    assert parse({key: json.dumps(QUESTION_ANSWER)}) == parse({key: QUESTION_ANSWER})
    assert reason({key: None}) == "messages is null, not a list"
    assert reason({key: {"a": 1}}) == "messages is an object, not a list"


def test_a_system_text_beside_the_messages_is_their_first():
    system = turns(("system", "s"))
    for key in ("system", "system_prompt"):
        row = {key: "s", "messages": QUESTION_ANSWER}
        assert parse(row).messages == system + QUESTION_ANSWER
        assert parse(row).trained == [False, False, True]
        assert parse({**row, "messages": json.dumps(QUESTION_ANSWER)}) == parse(row)
        assert parse({**row, key: " "}) == parse({"messages": QUESTION_ANSWER})
        assert parse({key: "s", "question": "q", "response": "a"}) == parse(row)
        own = [*turns(("system", "own")), *QUESTION_ANSWER]
        assert parse({**row, "messages": own}).messages == own
        gpt = [{"from": "system", "value": "own"}, {"from": "gpt", "value": "a"}]
        assert [m["content"] for m in parse({key: "s", "conversations": gpt}).messages] == [
            "own",
            "a",
        ]
        assert reason({**row, key: 1}) == f"{key} is a number, not text"


def test_prompts_and_completions_of_messages():
    earlier = turns(("user", "1"), ("assistant", "2"), ("user", "3"))
    answer = turns(("assistant", "4"))
    tools = [{"type": "function"}]
    chat = parse({"prompt": earlier, "completion": answer, "tools": tools})
    assert chat == Chat(earlier + answer, tools, [False, False, False, True])
    assert parse({"prompt": earlier, "completion": "4", "tools": tools}) == chat
    assert parse({"input": earlier, "output": "4", "tools": tools}) == chat
    assert parse({"prompt": "q", "completion": turns(("assistant", "a"))}).messages == (
        QUESTION_ANSWER
    )
    for prompt_format in ("text", "rendered"):
        keys = RowKeys(prompt_format=prompt_format)
        assert parse({"prompt": earlier, "completion": "4", "tools": tools}, keys) == chat
    assert reason({"prompt": earlier, "completion": turns(("user", "4"))}).startswith("no answer")
    assert reason({"prompt": earlier, "completion": []}).startswith("no answer")
    assert reason({"prompt": earlier[:2], "completion": []}).startswith("no answer")
    assert reason({"prompt": [1], "completion": "a"}).startswith("message 1 is a number")


def test_turns_in_a_history_are_not_lost_without_a_word():
    row = {"instruction": "q", "output": "a", "history": []}
    assert parse(row).messages == QUESTION_ANSWER
    row["history"] = [["q0", "a0"]]
    assert reason(row) == "history is not supported: give the turns as messages"


@pytest.mark.parametrize(("prompt_format", "rendered"), [("text", False), ("rendered", True)])
def test_passages(prompt_format, rendered):
    keys = RowKeys(prompt_format=prompt_format)
    assert parse({"prompt": " p\n", "completion": " c "}, keys) == Passage(" p\n", " c ", rendered)
    assert parse({"prompt": "", "completion": "c"}, keys) == Passage("", "c", rendered)
    alpaca = {"instruction": "i", "input": "j", "output": "o", "system": "not text"}
    assert parse(alpaca, keys) == Passage("i\n\nj", "o", rendered)
    assert reason({"prompt": "p", "completion": ""}, keys) == "no answer: completion is empty"
    named = RowKeys(text="body", prompt_format=prompt_format)
    assert parse({"body": "b", "text": "t"}, named) == Passage("", "b", rendered)
    assert parse({"messages": QUESTION_ANSWER}, keys).messages == QUESTION_ANSWER


def test_text_is_trained_only_where_the_user_names_its_key():
    keys = RowKeys(text="text")
    assert parse({"text": "t", "messages": QUESTION_ANSWER}, keys) == Passage("", "t", False)
    assert reason({"text": " "}, keys) == "no text: text is empty"
    assert reason({"text": 1}, keys) == "text is a number, not text"
    assert reason({"messages": QUESTION_ANSWER}, keys) == "expected text, found messages"


def test_br_m04_keys_that_the_user_names():
    row = {"dialog": QUESTION_ANSWER, "messages": turns(("assistant", "other"))}
    keys = RowKeys(messages="dialog")
    assert parse(row, keys).messages == QUESTION_ANSWER
    assert reason({"messages": [], "id": 1}, keys) == "expected dialog, found messages, id"
    assert reason({"dialog": None}, keys) == "expected dialog, found dialog"
    assert reason({"dialog": "x"}, keys) == "dialog is text, not a list"
    assert reason({"dialog": []}, keys) == "no dialog"
    pair = {"ask": "q", "reply": "a", "prompt": "other", "completion": "other"}
    assert parse(pair, RowKeys(prompt="ask", completion="reply")).messages == QUESTION_ANSWER
    assert parse({"ask": "q", "output": "a"}, RowKeys(prompt="ask")).messages == QUESTION_ANSWER
    assert parse({"query": "q", "b": "a"}, RowKeys(completion="b")).messages == QUESTION_ANSWER
    both = {"instruction": "q", "input": "more", "good": "a", "output": "bad"}
    chat = parse(both, RowKeys(prompt="instruction", completion="good"))
    assert [m["content"] for m in chat.messages] == ["q\n\nmore", "a"]
    swapped = parse({"input": "a", "instruction": "q"}, RowKeys("x", "instruction", "input"))
    assert swapped.messages == QUESTION_ANSWER
    assert reason({"id": 1}, RowKeys(prompt="ask", completion="reply")) == (
        "expected ask and reply, found id"
    )
    assert reason({"id": 1}, RowKeys(messages="dialog", prompt="ask")) == (
        "expected dialog or ask and one of completion, response, output, answer, solution, "
        "targets, found id"
    )
    with pytest.raises(RowError) as error:
        parse({"id": 1}, keys)
    assert error.value.kind == "no known text key"


def test_a_prompt_format_is_one_of_three():
    with pytest.raises(ValueError, match="prompt format is html; it must be one of chat, text"):
        RowKeys(prompt_format="html")


def test_known_keys_are_all_that_is_looked_at():
    """Rows without the other keys give the same."""

    class Watched(dict):
        seen: ClassVar[set] = set()

        def get(self, key, default=None):
            self.seen.add(key)
            return super().get(key, default)

        def __getitem__(self, key):
            self.seen.add(key)
            return super().__getitem__(key)

    named = RowKeys("m", "p", "c", "t", "i", "l", "k")
    rows = [
        {"messages": QUESTION_ANSWER},
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "output": "a", "input": "b"},
        {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1], "position_ids": [0, 1]},
        {"p": "q", "c": "a"},
        {"i": [1, 2], "l": [1, 2], "k": [1, 1]},
        {"m": QUESTION_ANSWER},
        {"t": "t"},
        {},
    ]
    for keys in (DETECT, named):
        for row in rows:
            with contextlib.suppress(RowError):
                parse_row(Watched(row), keys)
        assert Watched.seen <= known_keys(keys)
    assert {"messages", "labels", "t", "k"} <= Watched.seen
    assert "text" not in known_keys(DETECT)


def test_sharegpt_turns_keep_their_other_keys():
    turn = {"from": "gpt", "value": "a", "loss": False, "name": "n"}
    chat = parse({"conversations": [turn, {"from": "gpt", "value": "b"}]})
    assert chat.trained == [False, True]
    assert chat.messages[0] == {"role": "assistant", "content": "a", "name": "n"}
    assert reason({"messages": [{"from": ["gpt"], "value": "a"}]}) == (
        "unknown role a list of message 1"
    )


def test_tool_calls_as_json_text():
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": "\ud83d"}}}]
    message = {"role": "assistant", "content": "a", "tool_calls": json.dumps(calls), "name": "n"}
    found = parse({"messages": [message]}).messages[0]
    assert found["tool_calls"][0]["function"]["arguments"] == {"x": "\ufffd"}
    assert list(found) == list(message)
    for nothing in (None, [], "", {}):
        message = {"role": "assistant", "content": "a", "tool_calls": nothing}
        assert parse({"messages": [message]}).messages == turns(("assistant", "a"))


@pytest.mark.parametrize(
    ("escaped", "expected"),
    [
        (r"\ud800", "\ufffd"),
        (r"\uD800 \uDfff", "\ufffd \ufffd"),
        (r"\uD83D\uDE00 \ud83d\ude00", "\U0001f600 \U0001f600"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\\ud800", r"\ud800"),
        (r"\\\ud800", "\\\ufffd"),
        (r"\\ud83d\ude00", "\\ud83d\ufffd"),
    ],
)
def test_only_lone_surrogates_are_replaced(escaped, expected):
    message = f'{{"role": "assistant", "content": "{escaped}", "{escaped}": 1}}'
    found = parse_row(f'{{"messages": [{message}]}}'.encode()).messages[0]
    assert found == {"role": "assistant", "content": expected, expected: 1}


def tokens_of(row, keys=DETECT) -> tuple[list, list]:
    found = parse_row(row, keys)
    assert (found.tokens.dtype, found.mask.dtype) == (np.int64, np.uint8)
    as_arrays = {
        key: np.array(value, bool if isinstance(value[0], bool) else np.int32)
        if isinstance(value, list)
        else value
        for key, value in row.items()
    }
    same = parse_row(as_arrays, keys)
    assert np.array_equal(same.tokens, found.tokens)
    assert np.array_equal(same.mask, found.mask)
    return found.tokens.tolist(), found.mask.tolist()


IDS = {"input_ids": [5, 6, 7, 8]}


def test_token_rows_with_labels():
    assert tokens_of({**IDS, "labels": [-100, -100, 7, 8]}) == ([5, 6, 7, 8], [0, 0, 1, 1])
    assert tokens_of({**IDS, "labels": [5, 6, 7, 8]}) == ([5, 6, 7, 8], [1, 1, 1, 1])
    assert tokens_of({"input_ids": [7, 7, 7], "labels": [-100, 7, -100]}) == ([7] * 3, [0, 1, 0])


@pytest.mark.parametrize("name", MASKS)
def test_token_rows_with_masks(name):
    for mask in ([0, 1, 1, 0], [False, True, True, False]):
        assert tokens_of({**IDS, name: mask}) == ([5, 6, 7, 8], [0, 1, 1, 0])
    assert parse({**IDS, name: [0.0, 1.0, 1.0, 0.0]}).mask.tolist() == [0, 1, 1, 0]


def test_what_all_labels_and_masks_train_is_trained():
    row = {**IDS, "labels": [5, 6, 7, -100], "completion_mask": [0, 0, 1, 1]}
    assert tokens_of(row) == ([5, 6, 7, 8], [0, 0, 1, 0])
    row = {**IDS, "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}
    assert tokens_of(row) == ([5, 6, 7, 8], [0, 1, 0, 1])


def test_token_rows_by_named_keys():
    row = {"ids": [5, 6], "targets_of": [-100, 6], "m": [1, 0], "labels": [1], "loss_mask": [9]}
    assert tokens_of(row, RowKeys(tokens="ids", labels="targets_of")) == ([5, 6], [0, 1])
    row["m"] = [0, 1]
    assert tokens_of(row, RowKeys(tokens="ids", mask="m")) == ([5, 6], [0, 1])
    row = {**IDS, "m": [0, 0, 1, 0], "labels": [0]}
    assert tokens_of(row, RowKeys(mask="m")) == ([5, 6, 7, 8], [0, 0, 1, 0])
    assert tokens_of({"ids": [5, 6], "labels": [5, 6]}, RowKeys(tokens="ids")) == ([5, 6], [1, 1])
    assert reason({**IDS, "labels": [0]}, RowKeys(mask="m")) == (
        "expected input_ids and m, found input_ids, labels"
    )
    assert reason({"id": 1}, RowKeys(mask="m")) == "expected input_ids, found id"


@pytest.mark.parametrize(
    ("attention", "tokens", "mask"),
    [
        ([1, 1, 1, 1], [5, 6, 7, 8], [0, 1, 1, 0]),
        ([1, 1, 1, 0], [5, 6, 7], [0, 1, 1]),
        ([0, 1, 1, 0], [6, 7], [1, 1]),
        ([True, True, True, False], [5, 6, 7], [0, 1, 1]),
        (None, [5, 6, 7, 8], [0, 1, 1, 0]),
    ],
)
def test_padding_is_cut_off_by_the_attention_mask(attention, tokens, mask):
    row = {**IDS, "labels": [-100, 6, 7, -100], "attention_mask": attention}
    assert tokens_of(row) == (tokens, mask)


def test_positions_show_rows_of_several_samples():
    row = {**IDS, "labels": IDS["input_ids"], "position_ids": [0, 1, 2, 3]}
    assert len(parse(row).tokens) == 4
    assert reason({**row, "position_ids": [0, 1, 0, 1]}).startswith("packed row: position_ids")
    ragged = [0, [1, 2], 2, 3]
    assert reason({**row, "position_ids": ragged}).startswith("position_ids is not a list of")
    padded = {**row, "position_ids": [1, 1, 0, 1], "attention_mask": [0, 0, 1, 1]}
    assert parse(padded).tokens.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({**IDS}, "input_ids without labels or a mask: nothing says which tokens"),
        ({"input_ids": [], "labels": []}, "no token: input_ids is empty"),
        ({"input_ids": "5 6", "labels": [1]}, "input_ids is text, not a list"),
        ({"input_ids": [[5, 6]], "labels": [[5, 6]]}, "input_ids is a list of lists"),
        ({"input_ids": [[5, 6], [7]], "labels": [5]}, "input_ids is not a list of numbers"),
        ({"input_ids": [1.5, 2], "labels": [1, 2]}, "input_ids is not a list of whole numbers"),
        ({"input_ids": [True, False], "labels": [1]}, "input_ids is not a list of whole numbers"),
        ({"input_ids": ["a", "b"], "labels": [1, 2]}, "input_ids is not a list of whole numbers"),
        ({"input_ids": [1, None], "labels": [1, 2]}, "input_ids is not a list of whole numbers"),
        ({"input_ids": [1, 2**63], "labels": [1, 2]}, "input_ids is not a list of whole numbers"),
        ({"input_ids": [1, 10**30], "labels": [1, 2]}, "input_ids is not a list of whole numbers"),
        ({"input_ids": [5, -1], "labels": [5, -100]}, "negative token id: -1 in input_ids"),
        ({**IDS, "labels": [5, 6, 7]}, "labels has 3 entries, input_ids 4"),
        ({**IDS, "labels": [-100] * 4}, "no trained token"),
        ({**IDS, "labels": [5, -100, -100, -100]}, "no trained token"),
        ({**IDS, "loss_mask": [0] * 4}, "no trained token"),
        ({**IDS, "loss_mask": [0, 1, 2, 1]}, "loss_mask has 2; it must be 0 or 1"),
        ({**IDS, "loss_mask": [0, 0.5, 1, 1]}, "loss_mask has 0.5; it must be 0 or 1"),
        ({**IDS, "loss_mask": ["a"] * 4}, "loss_mask is not a list of 0 and 1"),
        ({**IDS, "loss_mask": 1}, "loss_mask is a number, not a list"),
        ({**IDS, "labels": [5, 6, 9, 8]}, "labels[2] is 9, neither -100 nor input_ids[2] = 7"),
        (
            {**IDS, "labels": [6, 7, 8, -100]},
            "labels[0] is 6, neither -100 nor input_ids[0] = 5; they look shifted by one, each the "
            "token after",
        ),
        (
            {**IDS, "labels": [-100, -100, 6, 7]},
            "labels[2] is 6, neither -100 nor input_ids[2] = 7; they look shifted by one, each the "
            "token before",
        ),
        (
            {**IDS, "labels": [5, 6, 7, 8], "attention_mask": [1, 0, 0, 1]},
            "hole in attention_mask: 0 at 1, 1 on both sides",
        ),
        ({**IDS, "labels": [5, 6, 7, 8], "attention_mask": [0] * 4}, "no token: attention_mask"),
        (
            {**IDS, "labels": [5, 6, 7, 8], "attention_mask": [1, 1, 2, 2]},
            "attention_mask has 2; it must be 0 or 1",
        ),
        (
            {**IDS, "labels": [-100, -100, -100, 8], "attention_mask": [1, 1, 1, 0]},
            "no trained token",
        ),
    ],
)
def test_reasons_of_token_rows(row, expected):
    assert reason(row).startswith(expected)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-200, 10)
    | st.integers()
    | st.floats()
    | st.sampled_from(["", " ", "user", "assistant", "tool", "function_call", "[]", "{}", "text"])
    | st.text(max_size=3)
    | st.just(OddValue("date32"))
)
NAMES = st.sampled_from(["role", "from", "content", "value", "tool_calls", "loss", "type", "text"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
) | st.lists(st.integers(-100, 3), max_size=5).map(np.array)


@settings(max_examples=500, deadline=None)
@given(
    row=st.dictionaries(st.sampled_from(sorted(known_keys(RowKeys(text="text")))), VALUES),
    keys=st.sampled_from(
        [DETECT]
        + [RowKeys(prompt_format=name) for name in ("text", "rendered")]
        + [
            RowKeys(**{name: key})
            for name, key in zip(
                ("messages", "prompt", "completion", "text", "tokens", "labels", "mask"),
                ("messages", "prompt", "output", "text", "labels", "labels", "loss_mask"),
                strict=True,
            )
        ]
    ),
)
def test_no_row_is_more_than_a_row_error(row, keys):
    try:
        found = parse_row(row, keys)
    except RowError as error:
        assert str(error)  # noqa: PT017
        return
    if isinstance(found, Chat):
        assert len(found.messages) == len(found.trained)
        assert all(isinstance(message["content"], str) for message in found.messages)
        assert any(message["role"] == "assistant" for message in found.messages)
    elif isinstance(found, Passage):
        assert found.completion.strip()
    else:
        assert found.mask[1:].any()


@pytest.mark.parametrize(("weight", "trained"), [(0, False), (0.0, False), (1, True), (None, True)])
def test_an_answer_of_weight_0_is_context(weight, trained):
    messages = chat("uaua")["messages"]
    messages[1]["weight"] = weight
    parsed = parse_row(json.dumps({"messages": messages}).encode())
    assert parsed.trained == [False, trained, False, True]
    assert "weight" not in parsed.messages[1]


def test_other_weights_of_an_answer_are_refused():
    messages = chat("ua")["messages"]
    messages[1]["weight"] = 0.5
    with pytest.raises(RowError, match=r"weight 0\.5 of an answer is neither 0 nor 1"):
        parse_row(json.dumps({"messages": messages}).encode())
