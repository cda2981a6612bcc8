"""Rendered chats -> token ids and masks.

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
from dataclasses import dataclass

import numpy as np

from megatron_hbp.corpus.control_tokens import BREAK, ControlTokens, reveal
from megatron_hbp.corpus.rows import RowError
from megatron_hbp.corpus.template import RenderedChat
from megatron_hbp.corpus.tokenizer import Place, Tokenizer


@dataclass(frozen=True)
class Part:
    """content: a control token's id, or plain text."""

    content: int | str
    place: Place
    trained: bool


def split(chat: RenderedChat, control_tokens: ControlTokens) -> Iterator[Part]:
    """Yields the parts of a chat in order, none of them empty."""
    edges = [edge for span in chat.spans for edge in span]  # trained between even and odd entries
    place = Place.START

    def texts(start: int, end: int) -> Iterator[Part]:
        nonlocal place
        inner = edges[bisect_right(edges, start) : bisect_left(edges, end)]
        for begin, stop in zip([start, *inner], [*inner, end], strict=True):
            if begin < stop:
                text = reveal(chat.text[begin:stop])
                yield Part(text, place, bisect_right(edges, begin) % 2 == 1)
                place = Place.AFTER_TEXT

    position = 0
    for match in control_tokens.find(chat.text):
        yield from texts(position, match.outer_start)
        trained = bisect_right(edges, match.start) % 2 == 1
        yield Part(match.token.id, place, trained)
        place = Place.AFTER_CONTROL_TOKEN
        position = match.outer_end
    yield from texts(position, len(chat.text))


def encode_chats(
    chats: Sequence[RenderedChat], tokenizer: Tokenizer
) -> list[tuple[np.ndarray, np.ndarray] | RowError]:
    """(tokens int64 [n], mask uint8 [n]) of each chat, or why it cannot be used."""
    parts = [list(split(chat, tokenizer.control_tokens)) for chat in chats]
    plain = [part for chat_parts in parts for part in chat_parts if isinstance(part.content, str)]
    encoded = iter(
        tokenizer.encode([str(part.content) for part in plain], [part.place for part in plain])
    )
    results: list[tuple[np.ndarray, np.ndarray] | RowError] = []
    for chat, chat_parts in zip(chats, parts, strict=True):
        ids: list[list[int]] = [
            [part.content] if isinstance(part.content, int) else next(encoded)
            for part in chat_parts
        ]
        if BREAK in chat.text and _leaks(ids, chat_parts, tokenizer.control_tokens):
            results.append(
                RowError(
                    "control token in content",
                    "control token in content: the tokenizer cannot encode its text as plain text",
                )
            )
            continue
        tokens = np.concatenate([np.array(part_ids, dtype=np.int64) for part_ids in ids])
        mask = np.repeat(
            np.array([part.trained for part in chat_parts], dtype=np.uint8), list(map(len, ids))
        )
        results.append(_with_one_start(tokens, mask, tokenizer))
    return results


def _leaks(ids: list[list[int]], parts: list[Part], control_tokens: ControlTokens) -> bool:
    return any(
        isinstance(part.content, str) and not control_tokens.ids.isdisjoint(part_ids)
        for part_ids, part in zip(ids, parts, strict=True)
    )


def _with_one_start(
    tokens: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    start_id = tokenizer.start_id
    if start_id is None or len(tokens) == 0:
        return tokens, mask
    count = int(np.argmax(tokens != start_id)) if (tokens != start_id).any() else len(tokens)
    if count > 1:
        return tokens[count - 1 :], mask[count - 1 :]
    if count == 0 and tokenizer.adds_start:
        return np.append(start_id, tokens), np.append(np.uint8(0), mask)
    return tokens, mask
