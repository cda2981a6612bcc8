"""Prints rows as they will be trained: masked and trained tokens in two colours.

Guarantees:
- every token is shown or counted as left out, in order; without colour the text between {+ and +}
  is what is trained;
- a character of several tokens comes out once and whole, unless the mask changes inside it;
- control tokens are shown by their text, tokens without text by their id;
- nothing in a row acts on the terminal: control characters and characters that turn or hide text
  are printed as escapes, and a row is never read as markup.

Line ends and tabs of trained text are marked. Long stretches are shown by their two ends, and how
much is left out is said there.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, takewhile

import numpy as np
from rich.console import Console
from rich.text import Text

from megatron_hbp.corpus.rows import RowError
from megatron_hbp.corpus.tokenizer import Tokenizer

# trained tokens take turns, which shows where one ends; both are green with 16 colours, too
_TRAINED_STYLES = ("black on color(40)", "black on color(77)")
_MASKED_STYLE = "default"  # one style: alternating text is hard to read
_NOTE_STYLE = "italic cyan"
_HEADER_STYLE = "bold"
_ERROR_STYLE = "red"

_END_LEN_MASKED = 300  # characters shown at each end of a long masked stretch
_END_LEN_TRAINED = 2000
_LEAST_LEFT_OUT = 20  # tokens; leaving out fewer saves nothing
_CONTEXT = 8  # tokens before, so that decoders that drop the first space drop none here
_MOST_PENDING = 16  # tokens of one character, with room
_REPLACEMENT = "\ufffd"
_LINE_END, _TAB = "\u21b5", "\u21e5"
_ACTING_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
_JOINERS = "\u200c\u200d"  # emoji and some scripts need these


def print_legend(console: Console) -> None:
    """Says once what the marks of `print_row` mean."""
    legend = Text()
    if _has_colour(console):
        legend.append("trained", _TRAINED_STYLES[0])
        legend.append(" tokens", _TRAINED_STYLES[1])
        legend.append(", all others are masked; ")
        legend.append("control tokens", "bold")
    else:
        legend.append("{+trained+} tokens, all others are masked")
    legend.append(f"; {_LINE_END} {_TAB} line end and tab in trained text")
    _print(console, legend)


def print_row(
    console: Console, where: str, tokens: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer
) -> None:
    """Prints one row: a line with `where` and its counts, then its text.

    tokens: int64 [n]. mask: uint8 [n], 1 = trained. where: for instance rows.jsonl:3.
    """
    trained = int(np.count_nonzero(mask))
    share = f" ({trained / len(tokens):.1%})" if len(tokens) else ""
    counts = f"  {len(tokens):,} tokens, {trained:,} trained{share}"
    colour = _has_colour(console)
    _print(console, Text(_escaped(where), _HEADER_STYLE if colour else "").append(counts))
    body = Text()
    ids = tokens.tolist()
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    for begin, end in pairwise(edges):
        if begin < end:
            append = _append_coloured if colour else _append_plain
            append(body, ids, begin, end, trained=bool(mask[begin]), tokenizer=tokenizer)
    if not body.plain.endswith("\n"):
        body.append("\n")
    _print(console, body)


def print_reject(console: Console, where: str, error: RowError) -> None:
    """Prints that a row is rejected, and why."""
    colour = _has_colour(console)
    line = Text(_escaped(where), _HEADER_STYLE if colour else "")
    line.append("  rejected: ", _ERROR_STYLE if colour else "")
    _print(console, line.append(_escaped(str(error)) + "\n"))


def _has_colour(console: Console) -> bool:
    # where escapes may be needed for the encoding, colours would not lie where they should
    return console.color_system is not None and not console.no_color and _takes_all(console)


def _takes_all(console: Console) -> bool:
    return console.encoding.startswith("utf")


def _print(console: Console, text: Text) -> None:
    if not _takes_all(console):
        plain = text.plain.encode(console.encoding, "backslashreplace").decode(console.encoding)
        text = Text(plain)
    console.print(text, soft_wrap=True)  # the terminal folds lines and keeps every space


def _append_coloured(
    body: Text, ids: list[int], begin: int, end: int, *, trained: bool, tokenizer: Tokenizer
) -> None:
    styles = _TRAINED_STYLES if trained else (_MASKED_STYLE,)
    for number, (start, stop, text) in enumerate(_shown(ids, begin, end, trained, tokenizer)):
        if text is None:
            body.append(_left_out(stop - start), _NOTE_STYLE)
            continue
        bold = " bold" if ids[start] in tokenizer.control_tokens.ids else ""
        body.append(_visible(text, trained), styles[number % len(styles)] + bold)


def _append_plain(
    body: Text, ids: list[int], begin: int, end: int, *, trained: bool, tokenizer: Tokenizer
) -> None:
    body.append("{+" if trained else "")
    for start, stop, text in _shown(ids, begin, end, trained, tokenizer):
        body.append(_left_out(stop - start) if text is None else _visible(text, trained))
    body.append("+}" if trained else "")


def _left_out(count: int) -> str:
    return f"[... {count:,} tokens ...]"


def _shown(
    ids: Sequence[int], begin: int, end: int, trained: bool, tokenizer: Tokenizer
) -> Iterator[tuple[int, int, str | None]]:
    """(start, stop, text) of the tokens to show, in order; text None for those left out."""
    limit = _END_LEN_TRAINED if trained else _END_LEN_MASKED
    head, head_end = _within(_pieces(ids, begin, min(end, begin + limit), tokenizer), limit, begin)
    yield from head
    from_end = list(_pieces(ids, max(head_end, end - limit), end, tokenizer))
    tail, _ = _within(reversed(from_end), limit, end)
    tail_start = tail[-1][0] if tail else end
    if tail_start - head_end < _LEAST_LEFT_OUT:
        yield from _pieces(ids, head_end, tail_start, tokenizer)
    else:
        yield head_end, tail_start, None
    yield from reversed(tail)


def _within(
    pieces: Iterable[tuple[int, int, str]], limit: int, at: int
) -> tuple[list[tuple[int, int, str]], int]:
    """(the first of `pieces` up to `limit` characters, where the last of them stops or `at`)."""
    taken: list[tuple[int, int, str]] = []
    length = 0
    for piece in pieces:
        length += len(piece[2])
        if length > limit and taken:
            break
        taken.append(piece)
    return taken, taken[-1][1] if taken else at


def _pieces(
    ids: Sequence[int], begin: int, end: int, tokenizer: Tokenizer
) -> Iterator[tuple[int, int, str]]:
    """(start, stop, text) of ids[begin:end]; the tokens of one character stay together."""
    control = {token.id: text for text, token in tokenizer.control_tokens.by_text.items()}
    known = range(tokenizer.vocab_size)
    context = begin
    while context > max(0, begin - _CONTEXT) and ids[context - 1] in known:
        context -= 1
    start = begin
    for position in range(begin, end):
        token_id = ids[position]
        stop = position + 1
        if token_id in control or token_id not in known:
            yield position, stop, control.get(token_id) or _by_id([token_id])
            context, start = (position if token_id in known else stop), stop
            continue
        before = tokenizer.decode(ids[context:start])
        text = tokenizer.decode(ids[context:stop])
        goes_on = stop < end and ids[stop] in known and ids[stop] not in control
        if text.endswith(_REPLACEMENT) and goes_on and stop - start < _MOST_PENDING:
            continue
        text = _after(before, text)
        yield start, stop, text or _by_id(ids[start:stop])
        context, start = start, stop


def _after(before: str, text: str) -> str:
    """What `text` has after its part in common with `before`, which most often is all of it."""
    if text.startswith(before):
        return text[len(before) :]
    pairs = zip(before, text, strict=False)
    return text[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]


def _by_id(ids: Sequence[int]) -> str:
    return "".join(f"<id {token_id}>" for token_id in ids)


def _visible(text: str, trained: bool) -> str:
    text = _escaped(text, keep="\n\t")
    if trained:
        text = text.replace("\n", _LINE_END + "\n").replace("\t", _TAB + "\t")
    return text


def _escaped(text: str, keep: str = "") -> str:
    """The text with an escape for each character that is not seen or acts on the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char in keep else _escaped_char(char) for char in text)


def _escaped_char(char: str) -> str:
    acts = unicodedata.category(char) in _ACTING_CATEGORIES and char not in _JOINERS
    return char.encode("unicode_escape").decode() if acts else char
