"""Renders chats with a chat template and finds the trained parts of the text.

Trained are the answers of the assistant and the control token that ends each of them: never the
header that opens the answer, never white space after the end token. Where the template has
{% generation %} blocks, these say what is trained, otherwise see answers.py.

Guarantees:
- what cannot be derived is a RowError, never a guess;
- rendering is sandboxed, sees no clock and no file;
- control-token text inside a message is never taken for a control token.

The template gets messages, tools, add_generation_prompt and the special tokens' texts, and the
filters and functions of Hugging Face's templates except `strftime_now`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from megatron_hbp.corpus.answers import QUESTION, AnswerFinder
from megatron_hbp.corpus.control_tokens import (
    GENERATION_END,
    GENERATION_START,
    RESERVED,
    ControlTokens,
    Match,
)
from megatron_hbp.corpus.rows import Chat, Passage, RowError, map_strings

DEFAULT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}tools\n{{ tools | tojson }}{{ eos_token }}{% endif %}"
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
_BLOCK = re.compile(r"\{%[-+]?\s*generation\b")
_MARKER = re.compile(f"[{GENERATION_START}{GENERATION_END}]")


@dataclass(frozen=True)
class RenderedChat:
    """text with control tokens of messages hidden. spans: trained [start, end) parts, ascending.

    matches: the control tokens in text. tail_id: a token that follows the text and is trained.
    """

    text: str
    spans: list[tuple[int, int]]
    matches: list[Match]
    tail_id: int | None = None


class ChatTemplate:
    """One chat template with one tokenizer's control tokens.

    source: Jinja text. variables: texts of the special tokens by name, e.g. bos_token.
    prints_tool_calls: whether tool calls reach the text. Raises ValueError when the source does not
    parse or answers do not end with a control token.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], control_tokens: ControlTokens
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlocks, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template does not parse: {error.message} (line {error.lineno}); "
                "give another one with --chat-template"
            ) from None
        # by default a mapping in Python code that every rendering copies
        self._template.globals = dict(self._template.globals)
        self._has_blocks = _BLOCK.search(source) is not None
        self._variables = dict(variables)
        self._control_tokens = control_tokens
        self._answers = AnswerFinder(self._unmarked, control_tokens)
        self._no_content, self.prints_tool_calls = self._probe_tool_calls()

    @property
    def end_token(self) -> str | None:
        """The control token that ends an answer, None when a probe chat cannot be rendered."""
        return self._answers.end_token

    def render(self, chat: Chat) -> RenderedChat:
        """Renders a chat. Raises RowError when the template refuses it or nothing is trained."""
        messages, tools = self._hidden(chat)
        text = self._text(messages, tools)
        if self._has_blocks:
            text, marked = self._from_markers(text)
            matches = list(self._control_tokens.find(text))
            spans = [self._with_end_token(text, span, matches) for span in marked]
            spans = _of_trained_answers(spans, chat)
        else:
            matches = list(self._control_tokens.find(text))
            spans = [
                self._answers.span(text, matches, messages, tools, index)
                for index, trained in enumerate(chat.trained)
                if trained
            ]
        kept: list[tuple[int, int]] = []
        for start, end in spans:
            # a block may hold nothing but the end token of the answer in the block before
            goes_on = bool(kept) and not text[kept[-1][1] : start].strip()
            if goes_on or self._answers.says_something(text, (start, end), matches):
                kept.append((start, end))
        if not kept:
            raise RowError("no trained token")
        return RenderedChat(text, kept, matches)

    def _hidden(self, chat: Chat) -> tuple[list[dict[str, Any]], Any]:
        """(messages, tools) with the control tokens in them hidden; the chat's own are not changed.

        Raises RowError for reserved characters.
        """
        control_tokens = self._control_tokens
        messages = []
        for message in chat.messages:
            if len(message) > 2 or control_tokens.may_occur_in(message["content"]):
                message = map_strings(  # noqa: PLW2901
                    message, lambda text: control_tokens.hide(_checked(text))
                )
                if message["content"] == "" and "tool_calls" in message:
                    message["content"] = self._no_content
            messages.append(message)
        if chat.tools is None:
            return messages, None
        return messages, map_strings(chat.tools, lambda text: control_tokens.hide(_checked(text)))

    def _text(self, messages: list[Any], tools: Any, *, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except Exception as error:  # whatever template code raises is about this row
            reason = " ".join(str(error).split())
            raise RowError("chat template", f"chat template: {reason}") from None

    def _unmarked(
        self, messages: list[Any], tools: Any, *, add_generation_prompt: bool = False
    ) -> str:
        text = self._text(messages, tools, add_generation_prompt=add_generation_prompt)
        return _MARKER.sub("", text) if self._has_blocks else text

    def _from_markers(self, marked: str) -> tuple[str, list[tuple[int, int]]]:
        """(text without markers, where the blocks lie in it)."""
        pieces, spans, length, opened = [], [], 0, None
        position = 0
        for marker in _MARKER.finditer(marked):
            pieces.append(marked[position : marker.start()])
            length += len(pieces[-1])
            position = marker.end()
            if marker.group() == GENERATION_START:
                opened = length
            elif opened is not None:
                spans.append((opened, length))
                opened = None
        pieces.append(marked[position:])
        return "".join(pieces), spans

    def _with_end_token(
        self, text: str, span: tuple[int, int], matches: list[Match]
    ) -> tuple[int, int]:
        start, end = span
        match = self._answers.closing(text, span, matches)
        if match is not None:
            return start, match.end
        if self.end_token is not None and text.startswith(self.end_token, end):
            return start, end + len(self.end_token)
        return span

    def _probe_tool_calls(self) -> tuple[str | None, bool]:
        """(content that makes the template print tool calls without content, whether it does)."""
        for content in ("", None):
            for arguments in ({"a": "b"}, '{"a": "b"}'):
                function = {"name": "probe_of_a_name", "arguments": arguments}
                call = {"id": "call00000", "type": "function", "function": function}
                answer = {"role": "assistant", "content": content, "tool_calls": [call]}
                try:
                    if "probe_of_a_name" in self._text([QUESTION, answer], None):
                        return content, True
                except RowError:
                    continue
        return "", False


def render_passage(
    passage: Passage, control_tokens: ControlTokens, end_ids: frozenset[int], end_id: int
) -> RenderedChat:
    """A prompt and its completion without a template: the completion and an end token are trained.

    end_ids: what a rendered completion may end with; otherwise end_id is added. Raises RowError
    when the completion says nothing or a reserved character is in the text.
    """
    prompt, completion = _checked(passage.prompt), _checked(passage.completion)
    if not completion.strip():
        raise RowError("no answer", "no answer: the text to train on is empty")
    if not passage.rendered:
        # what is hidden in both parts could still meet in the middle, so nothing is looked for
        text = control_tokens.hide(prompt) + control_tokens.hide(completion)
        start = len(text) - len(control_tokens.hide(completion))
        return RenderedChat(text, [(start, len(text))], [], end_id)
    text = prompt + completion
    matches = list(control_tokens.find(text))
    last = matches[-1] if matches else None
    if last is None or last.token.id not in end_ids or text[last.end :].strip():
        return RenderedChat(text, [(len(prompt), len(text))], matches, end_id)
    if not text[len(prompt) : last.start].strip():  # the prompt may even hold the end token
        raise RowError("no answer", "no answer: the text to train on is an end token")
    return RenderedChat(text, [(len(prompt), last.end)], matches)


class GenerationBlocks(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: puts markers around the text of the block."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return GENERATION_START + caller() + GENERATION_END


def _of_trained_answers(spans: list[tuple[int, int]], chat: Chat) -> list[tuple[int, int]]:
    """The spans of generation blocks that belong to answers to train on."""
    answers = [
        trained
        for message, trained in zip(chat.messages, chat.trained, strict=True)
        if message["role"] == "assistant"
    ]
    if all(answers):
        return spans
    if len(answers) != len(spans):
        raise RowError(
            "mask cannot be derived",
            f"mask cannot be derived: {len(spans)} generation blocks for {len(answers)} answers, "
            "of which some are not to be trained",
        )
    return [span for span, trained in zip(spans, answers, strict=True) if trained]


def _checked(text: str) -> str:
    if RESERVED.search(text):
        raise RowError("reserved character", "reserved character: U+FDD0 to U+FDD2 mark our text")
    return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face's templates have it: no HTML escapes, and non-ASCII text stays."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
