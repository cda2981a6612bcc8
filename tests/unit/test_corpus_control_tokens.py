"""Control tokens in text: found, and hidden in content."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hbp.corpus.control_tokens import ControlToken, ControlTokens, reveal

TOKENS = ["<s>", "</s>", "<|a|>", "<<|a|>>", "<|ab|>", "[X]", "x"]
CONTROL = ControlTokens({text: ControlToken(i) for i, text in enumerate(TOKENS)})


def found(text, control=CONTROL):
    return [(text[m.start : m.end], m.token.id) for m in control.find(text)]


def test_leftmost_longest():
    assert found("a<<|a|>>b<|a|></s><|ab|>x") == [
        ("<<|a|>>", 3),
        ("<|a|>", 2),
        ("</s>", 1),
        ("<|ab|>", 4),
    ]


def test_no_tokens_at_all():
    assert found("<s>", ControlTokens({})) == []
    assert ControlTokens({}).hide("<s>") == "<s>"


def test_white_space_that_a_token_swallows():
    control = ControlTokens(
        {"<l>": ControlToken(0, lstrip=True), "<r>": ControlToken(1, rstrip=True)}
    )
    text = "a \n<l> b <r>\n\n c"
    assert [text[m.outer_start : m.outer_end] for m in control.find(text)] == [
        " \n<l>",
        "<r>\n\n ",
    ]


@given(st.lists(st.sampled_from([*TOKENS, "<", "|", ">", "a", " "]), max_size=12).map("".join))
def test_hidden_text_holds_no_token_and_comes_back(text):
    hidden = CONTROL.hide(text)
    assert found(hidden) == []
    assert reveal(hidden) == text


def test_thousands_of_tokens_are_found():
    control = ControlTokens({f"<unused{i}>": ControlToken(i) for i in range(8000)})
    assert len(found("<p>text</p><unused7>" * 5000, control)) == 5000


@pytest.mark.parametrize("text", ["", "plain"])
def test_plain_text_is_left_alone(text):
    assert CONTROL.hide(text) == text
