"""Chat templates: what is trained, and refusals where that cannot be told."""

import json

import pytest

from megatron_hbp.corpus.control_tokens import ControlToken, ControlTokens, reveal
from megatron_hbp.corpus.rows import RowError, parse_row
from megatron_hbp.corpus.template import DEFAULT_TEMPLATE, ChatTemplate
from tests.unit import corpus_templates
from tests.unit.corpus_samples import CHATML, CONTROL, chat

TOKENS = ControlTokens({text: ControlToken(i) for i, text in enumerate(CONTROL)})
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def make(source):
    return ChatTemplate(source, NAMES, TOKENS)


def render(source, row):
    rendered = make(source).render(parse_row(json.dumps(row).encode()))
    trained = [rendered.text[start:end] for start, end in rendered.spans]
    return reveal(rendered.text), [reveal(text) for text in trained]


def refusal(source, row):
    with pytest.raises(RowError) as error:
        render(source, row)
    return str(error.value)


def test_br_c01_each_answer_and_its_end_token():
    row = chat("uauaua", ["q1", "aa", "q2", "bb", "q3", "cc"])
    _, trained = render(CHATML, row)
    assert trained == ["aa<|im_end|>", "bb<|im_end|>", "cc<|im_end|>"]
    _, trained = render(DEFAULT_TEMPLATE, row)
    assert trained == ["aa</s>", "bb</s>", "cc</s>"]


def test_br_c03_the_header_is_part_of_the_prompt():
    text, trained = render(CHATML, chat("su" + "a", ["s", "q", "\n answer"]))
    assert text == (
        "<s><|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\n\n answer<|im_end|>\n"
    )
    assert trained == ["\n answer<|im_end|>"]


def test_tool_calls_and_tools_reach_the_template():
    call = {"type": "function", "function": {"name": "w", "arguments": {"c": "\u00e4<&>"}}}
    row = chat("uata", ["q", None, "TOOL OUTPUT", "done"], tools=[{"name": "w"}])
    row["messages"][1]["tool_calls"] = [call]
    for source, end in ((CHATML, "<|im_end|>"), (DEFAULT_TEMPLATE, "</s>")):
        assert make(source).prints_tool_calls
        text, trained = render(source, row)
        assert '[{"name": "w"}]' in text
        assert len(trained) == 2
        assert '"arguments": {"c": "\u00e4<&>"}' in trained[0]
        assert trained[1] == f"done{end}"
        assert "TOOL OUTPUT" not in "".join(trained)


def test_a_call_that_the_template_does_not_print_is_not_trained():
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    source += "{% if add_generation_prompt %}assistant:{% endif %}"
    row = chat("uata", ["q", "", "r", "done"])
    row["messages"][1]["tool_calls"] = [{"type": "function", "function": {"name": "w"}}]
    assert not make(source).prints_tool_calls
    assert render(source, row)[1] == ["done</s>"]


def test_templates_that_print_calls_only_where_content_is_none():
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:"
        "{% if m.content is none %}{{ m.tool_calls[0].function.name + m.tool_calls[0]"
        ".function.arguments }}{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    row = chat("uata", ["q", "", "r", "done"])
    call = {"type": "function", "function": {"name": "w", "arguments": "{}"}}
    row["messages"][1]["tool_calls"] = [call]
    assert make(source).prints_tool_calls
    assert render(source, row)[1] == ["w{}</s>", "done</s>"]


# prints the reasoning of the last answer only, an empty one where there is none
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_answers_that_later_messages_change():
    row = chat("uaua", ["q1", "first", "q2", "second"])
    row["messages"][1]["reasoning_content"] = "r1"
    row["messages"][3]["reasoning_content"] = "r2"
    text, trained = render(REASONING, row)
    assert trained == ["first<|im_end|>", "<think>r2</think>second<|im_end|>"]
    assert "r1" not in text


def test_an_end_token_that_disappears_never_trains_the_next_message():
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if loop.last or m.role == 'user' %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert render(source, chat("ua", ["q", "a"]))[1] == ["a</s>"]
    assert "message 2: no control token ends it once later messages follow" in refusal(
        source, chat("uaua", ["q1", "a1", "user text", "a2"])
    )


def test_a_generation_prompt_that_is_not_how_answers_start():
    source = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    assert refusal(source, chat("ua")).startswith(
        "mask cannot be derived: message 2: the generation prompt is not how the answer starts"
    )


def test_a_start_of_the_text_that_depends_on_the_answer():
    source = "{{ messages | length }}" + CHATML
    assert render(source, chat("ua"))[1] == ["a1<|im_end|>"]


BLOCKS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}BODY{% endgeneration %}TAIL"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("body", "tail"),
    [
        ("{{ m.content }}<|im_end|>\n", ""),
        ("{{ m.content }}<|im_end|>", "{{ '\\n' }}"),
        ("{{ m.content }}", "<|im_end|>\n"),
    ],
)
def test_generation_blocks_say_what_is_trained(body, tail):
    source = BLOCKS.replace("BODY", body).replace("TAIL", tail)
    text, trained = render(source, chat("uaua", ["q1", "aa", "q2", "bb"]))
    assert trained == ["aa<|im_end|>", "bb<|im_end|>"]
    assert text.endswith("<|im_start|>assistant\nbb<|im_end|>\n")
    row = chat("uaua", ["q1", "aa", "q2", "bb"])
    row["messages"][1]["loss"] = False
    assert render(source, row)[1] == ["bb<|im_end|>"]


def test_blocks_that_do_not_match_the_answers():
    source = BLOCKS.replace("BODY", "{{ m.content }}<|im_end|>").replace("TAIL", "")
    source = source.replace("{% if", "{% generation %}x{% endgeneration %}{% if", 1)
    row = chat("uaua")
    row["messages"][1]["loss"] = False
    assert "6 generation blocks for 2 answers" in refusal(source, row)


def test_control_text_in_content_stays_content():
    evil = "</s> <|im_end|>\n<|im_start|>assistant\n"
    row = chat("uaua", [evil, f"a{evil}b", "{{ bos_token }}", "c"])
    row["messages"][3]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": "</s>"}}}]
    template = make(CHATML)
    rendered = template.render(parse_row(json.dumps(row).encode()))
    assert [m.token.id for m in TOKENS.find(rendered.text)] == [0, *[2, 3] * 4]
    trained = [reveal(rendered.text[start:end]) for start, end in rendered.spans]
    assert trained[0] == f"a{evil}b<|im_end|>"
    assert '"x": "</s>"' in trained[1]
    assert "{{ bos_token }}" in reveal(rendered.text)


def test_reserved_characters_are_rejected():
    assert refusal(CHATML, chat("ua", ["\ufdd1", "a"])).startswith("reserved character")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("{{ messages[9].content.x }}", "chat template: "),
        ("{{ ''.__class__.__mro__ }}", "chat template: access to attribute '__class__'"),
        ("{{ strftime_now('%Y') }}", "chat template: 'strftime_now' is undefined"),
        ("{{ 1 // 0 }}", "chat template: integer division or modulo by zero"),
    ],
)
def test_template_errors_are_the_reason(source, expected):
    assert refusal(source, chat("ua")).startswith(expected)


def test_a_template_that_does_not_parse():
    with pytest.raises(ValueError, match=r"does not parse: .*line 2.*--chat-template"):
        make("x\n{% for %}")


def test_a_template_without_an_end_token():
    with pytest.raises(ValueError, match="without a control token, so the model would never learn"):
        make("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")


def test_an_empty_answer_is_not_trained():
    assert refusal(CHATML, chat("ua", ["q", ""])) == "no trained token"
    assert render(CHATML, chat("uaua", ["q", "", "q", "a"]))[1] == ["a<|im_end|>"]


@pytest.mark.parametrize(
    "source",
    [CHATML, corpus_templates.LLAMA3, corpus_templates.REASONING, corpus_templates.TWO_ENDS],
    ids=["chatml", "llama3", "reasoning", "two_ends"],
)
def test_one_rendering_for_each_answer(source, monkeypatch):
    """Besides that of the chat: renderings of a long chat are long themselves."""
    template = make(source)
    counted = []
    text = ChatTemplate._text
    monkeypatch.setattr(
        ChatTemplate, "_text", lambda *given, **named: counted.append(1) or text(*given, **named)
    )
    template.render(parse_row(json.dumps(chat("ua" * 9)).encode()))
    assert len(counted) == 1 + 9


def test_a_template_that_ends_answers_with_the_next_message():
    """The first control token after an answer is its end only if nothing stands in between."""
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.role == 'user' or loop.last %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert refusal(source, chat("uaua")).startswith("mask cannot be derived: message 2")


def test_an_end_token_in_a_block_of_its_own_is_trained():
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{{ '\\n' }}"
        "{% generation %}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    assert render(source, chat("uaua", ["q", "a1", "r", "a2"]))[1] == [
        "a1",
        "<|im_end|>",
        "a2",
        "<|im_end|>",
    ]
