"""Masks with templates in the manner of well-known models, and of rows without a template."""

import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hbp.corpus.control_tokens import ControlToken, ControlTokens, reveal
from megatron_hbp.corpus.rows import RowError, RowKeys, parse_row
from megatron_hbp.corpus.template import ChatTemplate
from megatron_hbp.corpus.tokenizer import Place, load_tokenizer
from tests.unit.corpus_samples import CHATML, CONTROL, char_tokenizer, chat, prepare, rejects
from tests.unit.corpus_templates import (
    DEEPSEEK2,
    LLAMA3,
    MISTRAL,
    NO_PROMPT,
    REASONING,
    THINKS_ONCE,
    TWO_ENDS,
    TWO_ENDS_LAST,
    trained,
    trained_texts,
    with_blocks,
)

END = "<|im_end|>"


@pytest.mark.parametrize(
    "manner",
    [(CHATML, END, ""), (LLAMA3, "</s>", ""), (MISTRAL, "</s>", " "), (DEEPSEEK2, "</s>", " ")],
    ids=["chatml", "llama3", "mistral", "deepseek2"],
)
@pytest.mark.parametrize("blocks", [False, True], ids=["derived", "blocks"])
@pytest.mark.parametrize(
    "answers",
    [
        ["aa", "bb"],
        ["assistant\n", "Assistant:"],  # as the header
        ["<|im_start|>assistant\n", "</s><|im_end|>"],  # control tokens in words
        ["[INST] q [/INST]", "User: q\n\nAssistant:"],
        ["q", "q"],  # as the question
        ["\u4e2d\u6587\U0001f600", "\u00e4"],
    ],
)
def test_answers_of_each_template(tmp_path, manner, blocks, answers):
    template, end, before = manner
    source = with_blocks(template) if blocks else template
    assert ("{% generation %}" in source) is blocks
    row = chat("uaua", ["q", answers[0], "q", answers[1]])
    expected = [f"{before}{answer}{end}" for answer in answers]
    if template == LLAMA3:
        expected = [f"{answer.strip()}{end}" for answer in answers]
    assert trained(tmp_path, row, source) == expected


@pytest.mark.parametrize("blocks", [False, True], ids=["derived", "blocks"])
def test_white_space_around_answers(tmp_path, blocks):
    row = chat("uaua", ["q", "\n\n lead", "q", "trail \n"])
    for template, expected in (
        (CHATML, ["\n\n lead<|im_end|>", "trail \n<|im_end|>"]),
        (LLAMA3, ["lead</s>", "trail</s>"]),
        (MISTRAL, [" \n\n lead</s>", " trail \n</s>"]),
        (DEEPSEEK2, [" \n\n lead</s>", " trail \n</s>"]),
    ):
        source = with_blocks(template) if blocks else template
        assert trained(tmp_path, row, source) == expected


def test_reasoning_inside_the_content_of_earlier_answers(tmp_path):
    row = chat("uaua", ["q1", "<think>r1</think>a1", "q2", "<think>r2</think>a2"])
    assert trained(tmp_path, row, THINKS_ONCE) == ["a1</s>", "<think>r2</think>a2</s>"]


def test_a_second_token_after_the_end_of_the_last_answer(tmp_path):
    """Only the token that ends each answer is trained, no white space and no token after it."""
    for template in (TWO_ENDS, TWO_ENDS_LAST):
        assert trained(tmp_path, chat("ua", ["q", "a"]), template) == ["a<|im_end|>"]
        row = chat("uaua", ["q", "a", "q", "b"])
        assert trained(tmp_path, row, template) == ["a<|im_end|>", "b<|im_end|>"]
        assert trained(tmp_path, chat("uau", ["q", "a", "q"]), template) == ["a<|im_end|>"]


def test_br_c03_a_template_without_a_generation_prompt(tmp_path):
    """The header is the prompt's, whether the template can print it on its own or not."""
    row = chat("suaua", ["s", "q", "a", "q", "b"])
    assert trained(tmp_path, row, NO_PROMPT) == ["a<|im_end|>", "b<|im_end|>"]


def test_a_template_that_looks_at_the_first_message(tmp_path):
    template = "{{ '' if messages[0].role == 'system' else '' }}" + CHATML
    row = chat("aua", ["a0", "q", "a2"])
    assert trained(tmp_path, row, template) == ["a0<|im_end|>", "a2<|im_end|>"]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [("uuaa", ["a2", "a3"]), ("usuata", ["a3", "a5"]), ("uatta", ["a1", "a4"]), ("uau", ["a1"])],
)
def test_unusual_orders(tmp_path, roles, expected):
    assert trained(tmp_path, chat(roles)) == [f"{text}<|im_end|>" for text in expected]


def test_no_system_turn_where_the_template_has_none(tmp_path):
    tokenizer = char_tokenizer(tmp_path / "t", template=MISTRAL)
    corpus = prepare(tmp_path, [chat("sua"), chat("ua")], tokenizer)
    assert rejects(corpus) == [(1, "chat template: only user and assistant take turns")]
    assert trained_texts(corpus, tokenizer) == [" a1</s>"]


def test_br_c03_prompt_and_completion_are_a_question_and_an_answer(tmp_path):
    """The header belongs to the prompt, in whatever form the row is."""
    tokenizer = char_tokenizer(tmp_path / "t")
    question, answer = chat("u", ["q"])["messages"], chat("a", ["\n a "])["messages"]
    rows = [
        {"messages": [*question, *answer]},
        {"prompt": "q", "completion": "\n a "},
        {"prompt": question, "completion": answer},
        {"prompt": question, "completion": "\n a "},
        {"instruction": "q", "input": "", "output": "\n a "},
    ]
    corpus = prepare(tmp_path, rows, tokenizer)
    assert len(corpus) == len(rows)
    for i in range(len(rows)):
        assert trained_texts(corpus, tokenizer, i) == ["\n a <|im_end|>"]
        np.testing.assert_array_equal(corpus.tokens(i), corpus.tokens(0))
        np.testing.assert_array_equal(corpus.mask(i), corpus.mask(0))


def test_a_prompt_of_turns_is_context(tmp_path):
    """Answers inside the prompt are not trained."""
    row = {
        "prompt": chat("suau", ["s", "q", "earlier", "q2"])["messages"],
        "completion": "later",
    }
    for template in (CHATML, with_blocks(CHATML)):
        assert trained(tmp_path, row, template) == ["later<|im_end|>"]


@pytest.mark.parametrize("adds_start", [False, True])
def test_text_without_a_template(tmp_path, adds_start):
    tokenizer = char_tokenizer(tmp_path / "t", adds_start=adds_start)
    rows = [
        {"prompt": "Q: 1 + 1\nA:", "completion": " 2\n"},
        {"prompt": "<|im_", "completion": "end|></s>x"},
        {"prompt": "p", "completion": " "},
    ]
    keys = RowKeys(prompt_format="text")
    corpus = prepare(tmp_path, rows, tokenizer, keys=keys)
    assert [line for line, _ in rejects(corpus)] == [3]
    assert trained_texts(corpus, tokenizer) == [" 2\n</s>"]
    assert trained_texts(corpus, tokenizer, 1) == ["end|></s>x</s>"]
    control = corpus.tokens(1)[corpus.tokens(1) >= 256]
    assert control.tolist() == [256, 257][not adds_start :]  # only the start and our end token


def test_text_that_is_rendered_already(tmp_path):
    tokenizer = char_tokenizer(tmp_path / "t", adds_start=True, eos_token="<|im_end|>")
    prompt = "<s><|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    rows = [
        {"prompt": prompt, "completion": "a"},
        {"prompt": prompt, "completion": "a<|im_end|>"},
        {"prompt": prompt, "completion": "a<|im_end|>\n"},
    ]
    corpus = prepare(tmp_path, rows, tokenizer, keys=RowKeys(prompt_format="rendered"))
    for i in range(3):
        assert trained_texts(corpus, tokenizer, i) == ["a<|im_end|>"]
        assert corpus.tokens(i)[:2].tolist() == [256, 258]  # one start token


def test_rows_of_tokens_keep_their_mask(tmp_path):
    """Labels of -100 and masks say the same; what they leave out is left out."""
    tokenizer = char_tokenizer(tmp_path / "t")
    ids = load_tokenizer(tokenizer).encode(["ask say end"], [Place.START])[0]
    mask = [0] * 4 + [1] * 3 + [0] * 3 + [1]
    labels = [token if trains else -100 for token, trains in zip(ids, mask, strict=True)]
    rows = [{"input_ids": ids, "labels": labels}, {"input_ids": ids, "loss_mask": mask}]
    corpus = prepare(tmp_path, rows, tokenizer)
    for i in range(2):
        assert corpus.tokens(i).tolist() == ids
        assert trained_texts(corpus, tokenizer, i) == ["say", "d"]


CALL = {"type": "function", "function": {"name": "w", "arguments": {"c": "X"}}}


@pytest.mark.parametrize(
    "template",
    [CHATML, LLAMA3, REASONING, with_blocks(CHATML), with_blocks(LLAMA3)],
    ids=["chatml", "llama3", "reasoning", "chatml-blocks", "llama3-blocks"],
)
def test_br_c06_no_content_is_one_thing_in_each_template(tmp_path, template):
    found = []
    for content in (None, "", [], "missing"):
        row = chat("uata", ["q", content, "RESULT", "done"])
        row["messages"][1]["tool_calls"] = [CALL]
        if content == "missing":
            del row["messages"][1]["content"]
        found.append(trained(tmp_path, row, template))
    assert found[1:] == found[:1] * 3
    assert len(found[0]) == 2
    assert '"name": "w", "arguments": {"c": "X"}}' in found[0][0]
    assert "RESULT" not in "".join(found[0])


@pytest.mark.parametrize("blocks", [False, True], ids=["derived", "blocks"])
def test_br_c05_results_of_tools_are_never_trained(tmp_path, blocks):
    """One result, several, one that looks like an answer, one after the last answer."""
    template = with_blocks(CHATML) if blocks else CHATML
    looks = "<|im_end|>\n<|im_start|>assistant\nRESULT<|im_end|>\n"
    for roles, results in (("uata", 1), ("uattta", 3), ("uatatau", 2), ("uatat", 2)):
        contents = [looks if role == "t" else f"{role}{i}" for i, role in enumerate(roles)]
        row = chat(roles, contents)
        expected = [f"a{i}<|im_end|>" for i, role in enumerate(roles) if role == "a"]
        assert trained(tmp_path, row, template) == expected
        assert roles.count("t") == results


PIECES = [
    "a", " ", "\n", "<|im_start|>", "<|im_end|>", "</s>", "<s>", "assistant\n", "Assistant:",
    "User: ", "\u4e2d", "\ufffd", "{{ x }}", "[/INST]",
]  # fmt: skip
CONTENT = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
ROLES = st.lists(st.sampled_from("suat"), min_size=1, max_size=6).map("".join)


@functools.cache
def compiled(source):
    control = ControlTokens({text: ControlToken(i) for i, text in enumerate(CONTROL)})
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, control)


@settings(deadline=None, max_examples=300)
@given(roles=ROLES, data=st.data())
def test_any_chat_trains_its_answers_and_nothing_else(roles, data):
    """Whatever the order of roles and whatever the content spells."""
    row = chat(roles, [data.draw(CONTENT) for _ in roles])
    said = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
    said = [text for text in said if text.strip()]
    for template, end, before in (
        (CHATML, END, ""),
        (LLAMA3, "</s>", ""),
        (DEEPSEEK2, "</s>", " "),
    ):
        expected = [before + (t.strip() if template == LLAMA3 else t) + end for t in said]
        for source in (template, with_blocks(template)):
            made = compiled(source)
            if not said:
                with pytest.raises(RowError, match=r"no (answer|trained token)"):
                    made.render(parse_row(json.dumps(row).encode()))
                continue
            rendered = made.render(parse_row(json.dumps(row).encode()))
            found = [reveal(rendered.text[start:stop]) for start, stop in rendered.spans]
            assert found == expected


@pytest.mark.parametrize(
    ("opens", "roles"),
    [
        ("loop.last and add_generation_prompt", "aua"),
        ("loop.last and add_generation_prompt and m.role == 'user'", "uata"),
        ("loop.last and add_generation_prompt and m.role == 'user'", "sa"),
        ("loop.last and add_generation_prompt and m.role != 'assistant'", "uaa"),
    ],
)
@pytest.mark.parametrize("header", ["<|im_start|>assistant\n", "assistant:\n"])
def test_a_generation_prompt_after_certain_roles_only(tmp_path, opens, roles, header):
    """What opens an answer is not trained where the template prompts for none."""
    template = (
        "{% for m in messages %}"
        f"{{% if m.role == 'assistant' %}}{header}{{% else %}}{{{{ m.role }}}}:{{% endif %}}"
        f"{{{{ m.content }}}}<|im_end|>\n{{% if {opens} %}}{header}{{% endif %}}{{% endfor %}}"
    )
    expected = [f"{role}{i}{END}" for i, role in enumerate(roles) if role == "a"]
    assert trained(tmp_path, chat(roles), template) == expected


def test_no_opening_after_a_certain_role(tmp_path):
    """An answer that follows a tool's needs no prompt where the template prints none."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and loop.previtem.role != 'tool' %}"
        "<|im_start|>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>{% endif %}"
    )
    assert trained(tmp_path, chat("uata"), template) == [f"a1{END}", f"a3{END}"]


def test_an_opening_that_the_prompt_does_not_show_is_refused(tmp_path):
    """The start token in front of a first answer belongs to none: neither guessed nor trained."""
    template = (
        "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<|im_start|>"
        "{{ m.content }}<|im_end|>{% if loop.last and add_generation_prompt %}<|im_start|>"
        "{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="mask cannot be derived 1"):
        trained(tmp_path, chat("aua"), template)
