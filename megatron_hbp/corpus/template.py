"""Renders chats with a chat template and finds the trained parts of the text.

Trained are the answers of the assistant and the control token that ends each of them: never the
header that opens the answer, never white space after the end token.

Where the template has {% generation %} blocks, these say what is trained. Otherwise an answer
starts where the rendering of the messages before it, with the generation prompt, ends, and ends
with the first end token after that; control tokens inside messages are hidden while this is found.

Guarantees:
- what cannot be derived is a RowError, never a guess;
- rendering is sandboxed, sees no clock and no file;
- control-token text inside a message is never taken for a control token.

The template gets messages, tools, add_generation_prompt and the special tokens' texts, and the
filters and functions of Hugging Face's templates except `strftime_now`.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

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
_PROBE = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
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
    end_token: the control token that ends an answer, None when a probe chat cannot be rendered.
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
        self._has_blocks = _BLOCK.search(source) is not None
        self._variables = dict(variables)
        self._control_tokens = control_tokens
        self.end_token = self._probe_end_token()
        self._no_content, self.prints_tool_calls = self._probe_tool_calls()

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
                self._answer_span(text, matches, messages, tools, index)
                for index, trained in enumerate(chat.trained)
                if trained
            ]
        spans = [span for span in spans if _says_something(text, span, matches)]
        if not spans:
            raise RowError("no trained token")
        return RenderedChat(text, spans, matches)

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

    def _answer_span(
        self, text: str, matches: list[Match], messages: list[Any], tools: Any, index: int
    ) -> tuple[int, int]:
        """Where the answer `messages[index]` lies in `text`, end token included."""
        header = self._text(messages[:index], tools, add_generation_prompt=True)
        if not text.startswith(header):
            raise _underivable(index, "the generation prompt is not how the answer starts")
        until_answer = text
        if index < len(messages) - 1:
            until_answer = self._text(messages[: index + 1], tools)
            if not text.startswith(until_answer):
                return self._changed_answer_span(text, header, until_answer, messages, tools, index)
        match = _closing(until_answer, (len(header), len(until_answer)), matches)
        if match is None:
            raise _underivable(index, "no control token ends it")
        return len(header), match.end

    def _changed_answer_span(  # noqa: PLR0917  # private, and called once
        self,
        text: str,
        header: str,
        until_answer: str,
        messages: list[Any],
        tools: Any,
        index: int,
    ) -> tuple[int, int]:
        """`_answer_span` where the template prints an answer differently once others follow it
        (e.g. without its reasoning)."""
        if not until_answer.startswith(header):
            raise _underivable(index, "what comes before it depends on the answer")
        matches = list(self._control_tokens.find(until_answer))
        match = _closing(until_answer, (len(header), len(until_answer)), matches)
        if match is None:
            raise _underivable(index, "no control token ends it")
        if text.startswith(until_answer[: match.end]):
            return len(header), match.end
        # it ends with the same token, before anything that depends on the next message
        token_text = until_answer[match.start : match.end]
        other = [*messages]
        other[index + 1] = {**messages[index + 1], "content": GENERATION_END}
        shared = _common_prefix_len(text, self._text(other, tools))
        begin = text.find(token_text, len(header), shared)
        if begin < 0:
            raise _underivable(index, "no control token ends it once later messages follow")
        return len(header), begin + len(token_text)

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
        match = _closing(text, span, matches)
        if match is not None:
            return start, match.end
        if self.end_token is not None and text.startswith(self.end_token, end):
            return start, end + len(self.end_token)
        return span

    def _probe_end_token(self) -> str | None:
        try:
            text = _MARKER.sub("", self._text(_PROBE, None))
        except RowError:
            return None
        match = _closing(text, (0, len(text)), list(self._control_tokens.find(text)))
        if match is None:
            raise ValueError(
                "the chat template ends an answer without a control token, so the model would "
                "never learn to stop; end assistant messages with one, e.g. {{ eos_token }}, "
                "and give the template with --chat-template"
            )
        return text[match.start : match.end]

    def _probe_tool_calls(self) -> tuple[str | None, bool]:
        """(content that makes the template print tool calls without content, whether it does)."""
        for content in ("", None):
            for arguments in ({"a": "b"}, '{"a": "b"}'):
                function = {"name": "probe_of_a_name", "arguments": arguments}
                call = {"id": "call00000", "type": "function", "function": function}
                answer = {"role": "assistant", "content": content, "tool_calls": [call]}
                try:
                    if "probe_of_a_name" in self._text([_PROBE[0], answer], None):
                        return content, True
                except RowError:
                    continue
        return "", False


def render_passage(passage: Passage, control_tokens: ControlTokens, end_id: int) -> RenderedChat:
    """A prompt and its completion without a template: the completion and an end token are trained.

    Raises RowError when the completion says nothing or a reserved character is in the text.
    """
    prompt, completion = _checked(passage.prompt), _checked(passage.completion)
    if not completion.strip():
        raise RowError("no answer", "no answer: the text to train on is empty")
    if not passage.rendered:
        prompt, completion = control_tokens.hide(prompt), control_tokens.hide(completion)
    text = prompt + completion
    # what is hidden in both parts could still meet in the middle
    matches = list(control_tokens.find(text)) if passage.rendered else []
    last = _closing(text, (len(prompt), len(text)), matches)
    closed = last is not None and last.token.id == end_id
    span = (len(prompt), last.end if last is not None and closed else len(text))
    return RenderedChat(text, [span], matches, None if closed else end_id)


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


def _closing(text: str, span: tuple[int, int], matches: list[Match]) -> Match | None:
    """The control token that ends a span of the text, white space aside."""
    start, end = span
    place = bisect_right(matches, end, key=lambda match: match.end)
    if place == 0:
        return None
    last = matches[place - 1]
    if last.start < start or text[last.end : end].strip():
        return None
    return last


def _says_something(text: str, span: tuple[int, int], matches: list[Match]) -> bool:
    """Whether a span holds more than white space and its end token."""
    match = _closing(text, span, matches)
    return bool(text[span[0] : span[1] if match is None else match.start].strip())


def _common_prefix_len(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    different = (i for i, (one, other) in enumerate(pairs) if one != other)
    return next(different, min(len(first), len(second)))


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


def _underivable(index: int, why: str) -> RowError:
    return RowError(
        "mask cannot be derived",
        f"mask cannot be derived: message {index + 1}: {why}; a template with generation blocks "
        "says what is trained",
    )
