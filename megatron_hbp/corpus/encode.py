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
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_hbp.corpus.control_tokens import BREAK, reveal
from megatron_hbp.corpus.rows import RowError
from megatron_hbp.corpus.template import RenderedChat
from megatron_hbp.corpus.tokenizer import Place, Tokenizer


class Part(NamedTuple):
    """content: a control token's id, or plain text."""

    content: int | str
    place: Place
    trained: bool


def split(chat: RenderedChat) -> Iterator[Part]:
    """Yields the parts of a chat in order, none of them empty."""
    text = chat.text
    edges = [edge for span in chat.spans for edge in span]  # trained between even and odd entries
    place = Place.START
    position = 0
    for start, end, match in (
        *((match.outer_start, match.start, match) for match in chat.matches),
        (len(text), len(text), None),
    ):
        if position < start:
            inner = edges[bisect_right(edges, position) : bisect_left(edges, start)]
            for stop in (*inner, start):
                if position < stop:
                    trained = bisect_right(edges, position) % 2 == 1
                    yield Part(reveal(text[position:stop]), place, trained)
                    place = Place.AFTER_TEXT
                    position = stop
        if match is not None:
            yield Part(match.token.id, place, bisect_right(edges, end) % 2 == 1)
            place = Place.AFTER_CONTROL_TOKEN
            position = match.outer_end
    if chat.tail_id is not None:
        yield Part(chat.tail_id, place, True)


def encode_chats(
    chats: Sequence[RenderedChat], tokenizer: Tokenizer
) -> list[tuple[np.ndarray, np.ndarray] | RowError]:
    """(tokens int32 [n], mask uint8 [n]) of each chat, or why it cannot be used."""
    parts = [list(split(chat)) for chat in chats]
    plain = [part for part in chain(*parts) if isinstance(part.content, str)]
    encoded = iter(
        tokenizer.encode([str(part.content) for part in plain], [part.place for part in plain])
    )
    return [
        _encoded(chat, chat_parts, encoded, tokenizer)
        for chat, chat_parts in zip(chats, parts, strict=True)
    ]


def _encoded(
    chat: RenderedChat, parts: list[Part], encoded: Iterator[list[int]], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray] | RowError:
    ids: list[int] = []
    runs: list[int] = []
    hidden = BREAK in chat.text
    leaks = False
    for part in parts:
        before = len(ids)
        if isinstance(part.content, int):
            ids.append(part.content)
        else:
            part_ids = next(encoded)
            ids += part_ids
            leaks |= hidden and not tokenizer.control_tokens.ids.isdisjoint(part_ids)
        runs.append(len(ids) - before)
    if leaks:
        return RowError(
            "control token in content",
            "control token in content: the tokenizer cannot encode its text as plain text",
        )
    mask = np.repeat(np.array([part.trained for part in parts], dtype=np.uint8), runs)
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
