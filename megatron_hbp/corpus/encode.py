"""Rendered chats and passages -> token ids and masks.

The text is cut at control tokens and where training starts and stops, and the parts are encoded on
their own. So the tokens before an answer are those that generation starts from, and no token lies
half in and half out of what is trained.

Guarantees:
- the mask is 1 exactly on tokens of the rendered chat's spans;
- a sequence has one start token at its start where the tokenizer has the habit of adding one, and
  never two in a row there.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_hbp.corpus.control_tokens import BREAK, reveal
from megatron_hbp.corpus.rows import RowError
from megatron_hbp.corpus.template import RenderedChat
from megatron_hbp.corpus.tokenizer import Place, Tokenizer

# (a control token's id, or plain text; where it stands; whether it is trained)
Part = tuple[int | str, Place, bool]


def split(chat: RenderedChat) -> list[Part]:
    """The parts of a chat in order, none of them empty."""
    text = chat.text
    hidden = BREAK in text
    edges = [edge for span in chat.spans for edge in span]  # trained between even and odd entries
    parts: list[Part] = []
    place = Place.START
    position = 0

    def add_text(start: int, end: int) -> None:
        nonlocal place
        low = bisect_right(edges, start)
        for number, edge in enumerate((*edges[low : bisect_left(edges, end)], end), start=low):
            if start < edge:
                piece = text[start:edge]
                parts.append((reveal(piece) if hidden else piece, place, number % 2 == 1))
                place = Place.AFTER_TEXT
                start = edge

    for match in chat.matches:
        if position < match.outer_start:
            add_text(position, match.outer_start)
        parts.append((match.token.id, place, bisect_right(edges, match.start) % 2 == 1))
        place = Place.AFTER_CONTROL_TOKEN
        position = match.outer_end
    if position < len(text):
        add_text(position, len(text))
    if chat.tail_id is not None:
        parts.append((chat.tail_id, place, True))
    return parts


def encode_chats(
    chats: Sequence[RenderedChat], tokenizer: Tokenizer
) -> list[tuple[np.ndarray, np.ndarray] | RowError]:
    """(tokens int32 [n], mask uint8 [n]) of each chat, or why it cannot be used."""
    parts = [split(chat) for chat in chats]
    found: dict[tuple[str, Place], int] = {}  # role headers and the like occur again and again
    numbers = [
        found.setdefault((content, place), len(found))
        for chat_parts in parts
        for content, place, _ in chat_parts
        if isinstance(content, str)
    ]
    ids = tokenizer.encode([text for text, _ in found], [place for _, place in found])
    encoded = map(ids.__getitem__, numbers)
    return [
        _encoded(chat, chat_parts, encoded, tokenizer)
        for chat, chat_parts in zip(chats, parts, strict=True)
    ]


def _encoded(
    chat: RenderedChat, parts: list[Part], encoded: Iterator[list[int]], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray] | RowError:
    ids: list[int] = []
    edges: list[int] = []  # where training starts and stops, in tokens
    hidden = BREAK in chat.text
    leaks = False
    for content, _, trained in parts:
        if trained != len(edges) % 2:
            edges.append(len(ids))
        if isinstance(content, int):
            ids.append(content)
        else:
            part_ids = next(encoded)
            ids += part_ids
            leaks |= hidden and not tokenizer.control_tokens.ids.isdisjoint(part_ids)
    if leaks:
        return RowError(
            "control token in content",
            "control token in content: the tokenizer cannot encode its text as plain text",
        )
    mask = np.zeros(len(ids), dtype=np.uint8)
    for start, end in zip(edges[::2], [*edges[1::2], len(ids)], strict=False):
        mask[start:end] = 1
    return _with_one_start(np.fromiter(ids, np.int32, len(ids)), mask, tokenizer)


def _with_one_start(
    tokens: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    start_id = tokenizer.start_id
    if start_id is None or len(tokens) == 0:
        return tokens, mask
    count = 0
    while count < len(tokens) and tokens[count] == start_id:
        count += 1
    if count > 1:
        return tokens[count - 1 :], mask[count - 1 :]
    if count == 0 and tokenizer.adds_start:
        return np.append(np.int32(start_id), tokens), np.append(np.uint8(0), mask)
    return tokens, mask
