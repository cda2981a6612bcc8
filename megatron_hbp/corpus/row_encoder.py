"""A block of rows -> sequences and rejects: everything that decides what a row becomes.

Guarantees:
- every row is kept, rejected or dropped, the latter two with a reason; so is every token that a
  row had once it was tokenised: in = kept + dropped + truncated;
- rows stay in order; the same block and recipe give the same bytes in any process.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_hbp.corpus.blocks import Block, block_rows
from megatron_hbp.corpus.encode import encode_chats
from megatron_hbp.corpus.rows import Chat, Passage, RowError, RowKeys, TokenRow, parse_row
from megatron_hbp.corpus.template import ChatTemplate, RenderedChat, render_passage
from megatron_hbp.corpus.tokenizer import Tokenizer
from megatron_hbp.corpus.writer import Sequences, token_dtype

OVERLONG, UNTRAINED = "over-long", "no trainable token"  # reasons for dropping, as in a plan
TRUNCATED = "truncated"
_FORMS = {Chat: "chats", Passage: "passages", TokenRow: "token rows"}


@dataclass(frozen=True)
class Recipe:
    """What decides which sequence a row becomes.

    max_length: tokens a sequence may have, None for any number. overlong: error, drop or truncate.
    valid_share: share of the rows that is held out, by valid_seed. end_id: ends a passage.
    """

    tokenizer: Tokenizer
    template: str
    end_id: int
    keys: RowKeys
    max_length: int | None
    overlong: str
    valid_share: float
    valid_seed: int


@dataclass(frozen=True)
class Reject:
    """A row that was rejected, dropped or truncated, and why; tokens that were lost with it."""

    row: int
    action: str  # rejected | dropped | truncated
    kind: str
    reason: str
    tokens: int = 0


@dataclass
class EncodedBlock:
    """kept, held_out: sequences. rejects: in order. forms: how many rows had which form."""

    kept: Sequences
    held_out: Sequences
    rejects: list[Reject] = field(default_factory=list)
    rows_in: int = 0
    tokens_in: int = 0
    blank_lines: int = 0
    forms: dict[str, int] = field(default_factory=dict)


class RowEncoder:
    """Encodes blocks by one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        tokenizer = recipe.tokenizer
        self._template = ChatTemplate(
            recipe.template, tokenizer.variables, tokenizer.control_tokens
        )
        end_token = self._template.end_token
        ends = {recipe.end_id}
        if end_token is not None:
            ends.add(tokenizer.control_tokens.by_text[end_token].id)
        self._end_ids = frozenset(ends)
        self._dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, block: Block) -> EncodedBlock:
        """Encodes every row of a block."""
        empty = Sequences.join([], [], self._dtype)
        result = EncodedBlock(empty, empty)
        numbers: list[int] = []
        rendered: list[RenderedChat | TokenRow | RowError] = []
        for number, row in block_rows(block):
            if row == b"":
                result.blank_lines += 1
                continue
            numbers.append(number)
            rendered.append(self._rendered(row, result.forms))
        result.rows_in = len(numbers)
        chats = [item for item in rendered if isinstance(item, RenderedChat)]
        encoded = iter(encode_chats(chats, self._recipe.tokenizer))
        kept: list[tuple[int, tuple[np.ndarray, np.ndarray]]] = []
        held_out: list[tuple[int, tuple[np.ndarray, np.ndarray]]] = []
        for number, item in zip(numbers, rendered, strict=True):
            outcome = next(encoded) if isinstance(item, RenderedChat) else item
            pair = self._fitted(number, outcome, result)
            if pair is not None:
                (held_out if self._is_held_out(pair[0]) else kept).append((number, pair))
        result.kept = self._joined(kept)
        result.held_out = self._joined(held_out)
        return result

    def encode_row(
        self, number: int, row: bytes | dict[str, Any]
    ) -> tuple[np.ndarray, np.ndarray] | Reject:
        """(tokens int32 [n], mask uint8 [n]) of one row as it is kept, or why it is not."""
        item = self._rendered(row, {})
        if isinstance(item, RenderedChat):
            (item,) = encode_chats([item], self._recipe.tokenizer)
        empty = self._joined([])
        result = EncodedBlock(empty, empty)
        pair = self._fitted(number, item, result)
        return result.rejects[-1] if pair is None else pair

    def _rendered(
        self, row: bytes | dict[str, Any], forms: dict[str, int]
    ) -> RenderedChat | TokenRow | RowError:
        recipe = self._recipe
        try:
            parsed = parse_row(row, recipe.keys)
            form = _FORMS[type(parsed)]
            forms[form] = forms.get(form, 0) + 1
            if isinstance(parsed, Chat):
                return self._template.render(parsed)
            if isinstance(parsed, Passage):
                control_tokens = recipe.tokenizer.control_tokens
                return render_passage(parsed, control_tokens, self._end_ids, recipe.end_id)
        except RowError as error:
            return error
        return parsed

    def _fitted(
        self,
        number: int,
        outcome: tuple[np.ndarray, np.ndarray] | TokenRow | RowError,
        result: EncodedBlock,
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """(tokens, mask) of a row that is kept, cut if need be; None for one that is not."""
        if isinstance(outcome, TokenRow):
            outcome = _checked(outcome, self._recipe.tokenizer.vocab_size)
        rejects = result.rejects
        if isinstance(outcome, RowError):
            rejects.append(Reject(number, "rejected", outcome.kind, str(outcome)))
            return None
        tokens, mask = outcome
        if not mask[1:].any():
            rejects.append(Reject(number, "rejected", "no trained token", "no trained token"))
            return None
        result.tokens_in += len(tokens)
        limit = self._recipe.max_length
        if limit is None or len(tokens) <= limit:
            return outcome
        too_long = f"over-long: {len(tokens)} tokens, the maximum is {limit}"
        if self._recipe.overlong != "truncate":
            rejects.append(Reject(number, "dropped", OVERLONG, too_long, len(tokens)))
            return None
        if not mask[1:limit].any():
            reason = f"{UNTRAINED}: no trained token among the first {limit} of {len(tokens)}"
            rejects.append(Reject(number, "dropped", UNTRAINED, reason, len(tokens)))
            return None
        lost = len(tokens) - limit
        rejects.append(Reject(number, "truncated", TRUNCATED, f"{too_long}; {lost} cut", lost))
        return tokens[:limit], mask[:limit]

    def _is_held_out(self, tokens: np.ndarray) -> bool:
        """Decided by the tokens and the seed, so that equal sequences stay together."""
        recipe = self._recipe
        if recipe.valid_share == 0:
            return False
        key = str(recipe.valid_seed).encode()
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=8, key=key).digest()
        return int.from_bytes(digest) / 2**64 < recipe.valid_share

    def _joined(self, rows: list[tuple[int, tuple[np.ndarray, np.ndarray]]]) -> Sequences:
        return Sequences.join(
            [pair for _, pair in rows], [number for number, _ in rows], self._dtype
        )


def _checked(row: TokenRow, vocab_size: int) -> tuple[np.ndarray, np.ndarray] | RowError:
    tokens = row.tokens
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        wrong = int(tokens[np.argmax((tokens < 0) | (tokens >= vocab_size))])
        return RowError(
            "token id out of range",
            f"token id out of range: {wrong}; the tokenizer's ids are 0 to {vocab_size - 1}",
        )
    return tokens.astype(np.int32), row.mask
