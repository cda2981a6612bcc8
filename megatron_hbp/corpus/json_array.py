"""Cuts the text of one big JSON array into its items, without holding more than a few of them.

Guarantees:
- memory does not grow with the array, only with its longest item;
- an array with a syntax error, without its end or with text after it is an ArrayError;
- bytes that are not UTF-8 stay in their item, for whoever parses it to refuse.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator

_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_TOKEN = len("-Infinity")
_IN_NUMBERS = ("", *"+-.eE0123456789")
# numbers need no value here, and a number of thousands of digits has none
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)


class ArrayError(ValueError):
    """What is wrong with an array. at: the byte of its text where that was seen."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(what)
        self.at = at


def read_items(
    read: Callable[[int], bytes], at: int, target_bytes: int
) -> Iterator[tuple[list[bytes], int]]:
    """Yields (items, each JSON text on one line; the byte after the last of them).

    read: takes a number of bytes and gives at most so many of the text, b"" at its end, from byte
    `at` on, which is 0 or came from here. The items of one step take about target_bytes.
    Raises ArrayError, and what `read` raises, after the items before the place.
    """
    text = _Window(read, at, target_bytes)
    is_first = at == 0
    if is_first and not text.take("["):
        raise ArrayError("no array starts there", text.at)
    items: list[bytes] = []
    size, end = 0, at
    try:
        while not text.take("]"):
            if not is_first and not text.take(","):
                what = "a comma is missing" if text.next() else "the array does not end"
                raise ArrayError(what, text.at)
            is_first = False
            items.append(text.take_item())
            size, end = size + len(items[-1]), text.at
            if size >= target_bytes:
                yield items, end
                items, size = [], 0
        if text.next():
            raise ArrayError("there is text after the end of the array", text.at)
    except Exception:
        if items:  # what comes before the damage is good
            yield items, end
        raise
    if items:
        yield items, end


class _Window:
    """The part of a text that is being looked at; `at` is the byte where it goes on."""

    def __init__(self, read: Callable[[int], bytes], at: int, target_bytes: int) -> None:
        self._read = read
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._read_bytes = target_bytes
        self._text = ""
        self._position = 0
        self._ended = False
        self.at = at
        if at == 0 and self._grow() and self._text.startswith("\ufeff"):
            self._position, self.at = 1, len(codecs.BOM_UTF8)

    def next(self) -> str:
        """The next character that is no white space, "" at the end."""
        while True:
            end = _SPACE.match(self._text, self._position).end()  # type: ignore[union-attr]
            self.at += end - self._position
            self._position = end
            if end < len(self._text):
                return self._text[end]
            if not self._grow():
                return ""

    def take(self, character: str) -> bool:
        """Steps over the character if it comes next."""
        if self.next() != character:
            return False
        self._position += 1
        self.at += 1
        return True

    def take_item(self) -> bytes:
        """The JSON value that comes next."""
        if not self.next():
            raise ArrayError("the array does not end", self.at)
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                if self._may_be_cut(error) and self._grow():
                    continue
                place = self.at + len(self._encoded(error.pos))
                is_cut = error.pos >= len(self._text) or error.msg.startswith("Unterminated")
                what = "the array does not end" if is_cut else error.msg
                raise ArrayError(what, place) from None
            except RecursionError:
                raise ArrayError("a row is nested too deeply", self.at) from None
            # a number may go on, but what makes it go on is short
            may_go_on = self._text[end : end + 1] in _IN_NUMBERS
            if not may_go_on or end + _LONGEST_TOKEN <= len(self._text) or not self._grow():
                break
        item = self._encoded(end)
        self._position = end
        self.at += len(item)
        # line ends are white space here: inside strings they would have been errors
        return item.replace(b"\n", b" ").replace(b"\r", b" ")

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        return (
            error.msg.startswith("Unterminated string")
            or error.pos >= len(self._text) - _LONGEST_TOKEN
        )

    def _encoded(self, end: int) -> bytes:
        return self._text[self._position : end].encode("utf-8", "surrogateescape")

    def _grow(self) -> bool:
        """Reads on and forgets what was taken; False at the end of the text."""
        if self._ended:
            return False
        left = len(self._text) - self._position
        # at least as much again as is held, so that a long item is not parsed again too often
        data = self._read(max(self._read_bytes, left))
        self._ended = not data
        more = self._decoder.decode(data, final=self._ended)
        if not more:  # the text ends, or a character is not yet whole
            return self._grow()
        self._text = self._text[self._position :] + more
        self._position = 0
        return True
