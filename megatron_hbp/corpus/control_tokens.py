"""Finds control tokens (start, end, role and tool markers) in text, and hides them in content.

Guarantees:
- matches are leftmost, then longest, as in the `tokenizers` library;
- after `hide`, `find` finds nothing in the text, and `reveal` gives the text back.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Unicode noncharacters, never meant for interchange; a row that holds one is rejected
BREAK, GENERATION_START, GENERATION_END = "\ufdd0", "\ufdd1", "\ufdd2"
_RESERVED = BREAK + GENERATION_START + GENERATION_END
RESERVED = re.compile(f"[{_RESERVED}]")

_PREFIX_LEN = 4


@dataclass(frozen=True)
class ControlToken:
    """id in the vocabulary; lstrip, rstrip: whether it swallows white space around it."""

    id: int
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class Match:
    """A token at text[start:end]; the white space it swallows reaches to outer_start, outer_end."""

    start: int
    end: int
    outer_start: int
    outer_end: int
    token: ControlToken


class ControlTokens:
    """The control tokens of a tokenizer by their text; texts of one character are left out."""

    def __init__(self, tokens: Mapping[str, ControlToken]) -> None:
        self.by_text = {text: token for text, token in tokens.items() if len(text) > 1}
        self.ids = frozenset(token.id for token in self.by_text.values())
        self._lengths = sorted({len(text) for text in self.by_text}, reverse=True)
        # vocabularies may reserve thousands of them, nearly all with the same beginning
        prefixes = sorted({text[:_PREFIX_LEN] for text in self.by_text})
        shared = _common_start(prefixes)  # a literal start makes the search much faster
        rest = "|".join(re.escape(prefix[len(shared) :]) for prefix in prefixes)
        self._prefix = re.compile(f"{re.escape(shared)}(?:{rest})" if prefixes else "(?!)")
        self._beginnings = sorted({text[:2] for text in self.by_text})

    def find(self, text: str) -> Iterator[Match]:
        """Yields the control tokens in `text`, in order, not overlapping."""
        position = 0
        while candidate := self._prefix.search(text, position):
            start = candidate.start()
            found = self._at(text, start)
            if found is None:
                position = start + 1
                continue
            end = start + len(found)
            token = self.by_text[found]
            outer_start, outer_end = start, end
            while token.lstrip and outer_start > position and text[outer_start - 1].isspace():
                outer_start -= 1
            while token.rstrip and outer_end < len(text) and text[outer_end].isspace():
                outer_end += 1
            yield Match(start, end, outer_start, outer_end, token)
            position = outer_end

    def may_occur_in(self, text: str) -> bool:
        """Whether a control token or a reserved character can be in the text; quick, never wrong
        when it says no."""
        for beginning in self._beginnings:  # a loop: any() costs several times as much
            if beginning in text:
                return True
        return not text.isascii() and any(character in text for character in _RESERVED)

    def hide(self, text: str) -> str:
        """The text with every control token in it broken by a character that `reveal` removes."""
        position = 0
        while candidate := self._prefix.search(text, position):
            position = candidate.start() + 1
            if self._at(text, position - 1) is not None:
                text = text[:position] + BREAK + text[position:]
        return text

    def _at(self, text: str, start: int) -> str | None:
        for length in self._lengths:
            if text[start : start + length] in self.by_text:
                return text[start : start + length]
        return None


def _common_start(texts: list[str]) -> str:
    """What all of the sorted texts begin with."""
    if not texts:
        return ""
    first, last = texts[0], texts[-1]
    length = next((i for i, char in enumerate(first) if last[i : i + 1] != char), len(first))
    return first[:length]


def reveal(text: str) -> str:
    """Undoes `ControlTokens.hide`."""
    return text.replace(BREAK, "")
