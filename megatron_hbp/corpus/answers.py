"""Finds the answers of a chat in its rendered text, for templates that do not mark them.

An answer starts where the rendering of the messages before it, with the generation prompt, ends,
and ends with the template's end token. How a template opens and ends answers is tried out on probe
chats once; every answer is then checked against renderings of its own chat.

Guarantees:
- what cannot be derived is a RowError, never a guess;
- the header that opens an answer is not part of it, nor is what follows its end token.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any, Protocol

from megatron_hbp.corpus.control_tokens import GENERATION_END, ControlTokens, Match
from megatron_hbp.corpus.rows import ROLES, RowError

QUESTION = {"role": "user", "content": "probe of a question"}
_ANSWER = {"role": "assistant", "content": "probe of an answer"}
_FOLLOWING = "probe of what follows"
Span = tuple[int, int]


class Render(Protocol):
    """Renders messages; raises RowError where the template refuses them."""

    def __call__(
        self, messages: list[Any], tools: Any, *, add_generation_prompt: bool = False
    ) -> str: ...


class AnswerFinder:
    """Knows how one template opens and ends answers.

    end_token: the control token that ends an answer, None when a probe chat cannot be rendered.
    Raises ValueError when answers do not end with a control token.
    """

    def __init__(self, render: Render, control_tokens: ControlTokens) -> None:
        self._render = render
        self._control_tokens = control_tokens
        self.end_token = self._probe_end_token()
        self._prompt, self._header = self._probe_openings()
        self._plain_followers = frozenset(
            role for role in ROLES if self.end_token and self._ends_plainly_before(role)
        )

    def span(
        self, text: str, matches: list[Match], messages: list[Any], tools: Any, index: int
    ) -> Span:
        """Where the answer `messages[index]` lies in `text`, end token included.

        matches: the control tokens in text. Raises RowError.
        """
        try:
            header = self._render(messages[:index], tools, add_generation_prompt=True)
            header += self._header
        except RowError:  # some templates need a first message
            header = None
        if header is None or not text.startswith(header):
            return self._moved_span(text, matches, messages, tools, index)
        header = self._with_opening(header, text, matches, messages, tools, index)
        until_answer = text
        if index < len(messages) - 1:
            match = self._plain_end(messages, index, text, len(header), matches)
            if match is not None:
                return len(header), match.end
            until_answer = self._render(messages[: index + 1], tools)
            if not text.startswith(until_answer):
                return self._changed_span(text, header, until_answer, messages, tools, index)
        match = self.closing(until_answer, (len(header), len(until_answer)), matches)
        if match is None:
            raise _underivable(index, "no control token ends it")
        return len(header), match.end

    def closing(self, text: str, span: Span, matches: list[Match]) -> Match | None:
        """The control token that ends an answer at the end of a span, if one does.

        A template may print more of them after its end token, e.g. one that ends the whole chat.
        """
        last = None
        for match in _closing_matches(text, span, matches):
            if text[match.start : match.end] == self.end_token:
                return match
            last = last or match
        return last

    def says_something(self, text: str, span: Span, matches: list[Match]) -> bool:
        """Whether a span holds more than white space and its end token."""
        match = self.closing(text, span, matches)
        return bool(text[span[0] : span[1] if match is None else match.start].strip())

    def _with_opening(  # noqa: PLR0917  # private, and called once
        self,
        header: str,
        text: str,
        matches: list[Match],
        messages: list[Any],
        tools: Any,
        index: int,
    ) -> str:
        """`header` to where the answer starts: some templates print a generation prompt after
        certain roles only, but open every answer."""
        opening = self._prompt + self._header
        start = len(header)
        place = bisect_left(matches, start, key=lambda match: match.start)
        opens = place < len(matches) and not text[start : matches[place].start].strip()
        if header.endswith(opening) and (opening or not opens):
            return header
        between = text[start : self._own_place(text, messages, tools, index)]
        if opening and between.startswith(opening):
            return header + opening
        if between.strip():
            raise _underivable(index, "the generation prompt is not how the answer starts")
        return header

    def _plain_end(
        self, messages: list[Any], index: int, text: str, start: int, matches: list[Match]
    ) -> Match | None:
        """The end token of an answer of mere content: the first control token in it.

        None where that is not known to hold. Saves a rendering for each such answer.
        """
        if len(messages[index]) > 2 or messages[index + 1]["role"] not in self._plain_followers:
            return None
        place = bisect_left(matches, start, key=lambda match: match.start)
        match = matches[place] if place < len(matches) else None
        if match is None or text[match.start : match.end] != self.end_token:
            return None
        return match

    def _moved_span(
        self, text: str, matches: list[Match], messages: list[Any], tools: Any, index: int
    ) -> Span:
        """`span` where what comes before the answer changes once others follow it (e.g. earlier
        reasoning goes): the answer starts after the last opening before what is its own."""
        opening = self._prompt + self._header
        if not any(self._control_tokens.find(opening)):  # text of a message could be the same
            raise _underivable(index, "the generation prompt is not how the answer starts")
        own = self._own_place(text, messages, tools, index)
        answers = sum(message["role"] == "assistant" for message in messages[: index + 1])
        start = text.rfind(opening, 0, own)
        if start < 0 or text.count(opening, 0, own) != answers:
            raise _underivable(index, "the generation prompt is not how the answer starts")
        start += len(opening)
        if index == len(messages) - 1:
            match = self.closing(text, (start, len(text)), matches)
            end = -1 if match is None else match.end
        else:
            token_text = self.end_token or ""
            end = text.find(token_text, start, self._own_place(text, messages, tools, index + 1))
            end = end if end < 0 or not token_text else end + len(token_text)
        if end <= start:
            raise _underivable(index, "no control token ends it")
        return start, end

    def _changed_span(  # noqa: PLR0917  # private, and called once
        self,
        text: str,
        header: str,
        until_answer: str,
        messages: list[Any],
        tools: Any,
        index: int,
    ) -> Span:
        """`span` where the template prints an answer differently once others follow it (e.g.
        without its reasoning)."""
        if not until_answer.startswith(header):
            raise _underivable(index, "what comes before it depends on the answer")
        matches = list(self._control_tokens.find(until_answer))
        match = self.closing(until_answer, (len(header), len(until_answer)), matches)
        if match is None:
            raise _underivable(index, "no control token ends it")
        if text.startswith(until_answer[: match.end]):
            return len(header), match.end
        # it ends with the same token, before anything that depends on the next message
        token_text = until_answer[match.start : match.end]
        begin = text.find(
            token_text, len(header), self._own_place(text, messages, tools, index + 1)
        )
        if begin < 0:
            raise _underivable(index, "no control token ends it once later messages follow")
        return len(header), begin + len(token_text)

    def _own_place(self, text: str, messages: list[Any], tools: Any, index: int) -> int:
        """How long the part of the text is that does not depend on what message `index` says."""
        other = [*messages]
        other[index] = {"role": messages[index]["role"], "content": GENERATION_END}
        return _common_prefix_len(text, self._render(other, tools))

    def _probe_end_token(self) -> str | None:
        try:
            text = self._render([QUESTION, _ANSWER], None)
        except RowError:
            return None
        matches = list(self._control_tokens.find(text))
        closing = list(_closing_matches(text, (0, len(text)), matches))
        if not closing:
            raise ValueError(
                "the chat template ends an answer without a control token, so the model would "
                "never learn to stop; end assistant messages with one, e.g. {{ eos_token }}, "
                "and give the template with --chat-template"
            )
        first = closing[-1]
        return text[first.start : first.end]

    def _probe_openings(self) -> tuple[str, str]:
        """(the generation prompt, what the template prints before an answer besides that)."""
        try:
            question = self._render([QUESTION], None)
            prompted = self._render([QUESTION], None, add_generation_prompt=True)
            text = self._render([QUESTION, _ANSWER], None)
        except RowError:
            return "", ""
        start = _common_prefix_len(question, prompted)  # a token may end what has no prompt
        for match in self._control_tokens.find(prompted):
            start = match.start if match.start < start < match.end else start
        prompt = prompted[start:]
        if prompt or not text.startswith(question):
            return prompt, ""
        header = text[len(question) :].partition(_ANSWER["content"])[0]
        return "", header if header.strip() else ""

    def _ends_plainly_before(self, role: str) -> bool:
        """Whether an answer of mere content that a message of `role` follows ends with the first
        control token in it, as it does when nothing follows; tried at two places of a chat."""
        following = {"role": role, "content": _FOLLOWING}
        messages = [QUESTION, _ANSWER, following, _ANSWER, following, _ANSWER]
        try:
            text = self._render(messages, None)
            matches = list(self._control_tokens.find(text))
            for index in (1, 3):
                header = self._render(messages[:index], None, add_generation_prompt=True)
                header += self._header
                place = bisect_left(matches, len(header), key=lambda match: match.start)
                if not text.startswith(header) or place == len(matches):
                    return False
                start, end = matches[place].start, matches[place].end
                answer = text[len(header) : start].strip()
                if text[start:end] != self.end_token or not answer.endswith(_ANSWER["content"]):
                    return False
        except RowError:
            return False
        return True


def _closing_matches(text: str, span: Span, matches: list[Match]) -> Iterator[Match]:
    """The control tokens at the end of a span of the text, white space aside, from the last one."""
    start, end = span
    for place in range(bisect_right(matches, end, key=lambda match: match.end) - 1, -1, -1):
        match = matches[place]
        if match.start < start or text[match.end : end].strip():
            return
        yield match
        end = match.start


def _common_prefix_len(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    different = (i for i, (one, other) in enumerate(pairs) if one != other)
    return next(different, min(len(first), len(second)))


def _underivable(index: int, why: str) -> RowError:
    return RowError(
        "mask cannot be derived",
        f"mask cannot be derived: message {index + 1}: {why}; a template with generation blocks "
        "says what is trained",
    )
