"""Reads JSON-lines files of chats and brings each row into one form.

Guarantees:
- rows are split at LF only (a CR before it is dropped), so U+2028 and the like stay in their row;
- a row that cannot be used is a RowError with a reason, never a crash of the file;
- lone surrogates become U+FFFD; a missing, null or empty content are the same.

A row has `messages` (role and content, optionally tool_calls, reasoning_content, name) or ShareGPT
`conversations` (from and value), and optionally `tools`. An assistant message with `"loss": false`
is context only. Other keys are ignored.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    **{role: role for role in ROLES},
}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class RowError(ValueError):
    """Why a row is rejected. kind: what the summary counts; the text may add the row's details."""

    def __init__(self, kind: str, text: str | None = None) -> None:
        super().__init__(text or kind)
        self.kind = kind


@dataclass(frozen=True)
class Chat:
    """messages: dicts with a known role and a text content, at least one of them an answer.

    tools: what the chat template gets as `tools`. trained: per message, whether it is an answer to
    train on (an assistant message that says something and is not marked `"loss": false`).
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    trained: list[bool]


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (1-based line number, bytes without the line end), blank lines included."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            yield number, content.strip(b" \t\r\n")


def parse_row(line: bytes) -> Chat:
    """The chat on one line. Raises RowError."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8", f"not UTF-8: byte {error.start} of the row") from None
    except RecursionError:
        raise RowError("not JSON", "not JSON: nested too deeply") from None
    except ValueError as error:
        raise RowError("not JSON", f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowError("not an object", f"expected an object, found {_type_name(row)}")
    row = map_strings(row, lambda text: _LONE_SURROGATE.sub("\ufffd", text))
    if "messages" in row:
        messages = row["messages"]
    elif "conversations" in row:
        messages = row["conversations"]
    else:
        found = ", ".join(row) or "no key"
        raise RowError("no known text key", f"expected messages, found {found}")
    if not isinstance(messages, list):
        raise RowError("messages is not a list", f"messages is {_type_name(messages)}, not a list")
    if not messages:
        raise RowError("no messages")
    chat = [_message(message, number) for number, message in enumerate(messages, start=1)]
    if all(message["role"] != "assistant" for message in chat):
        raise RowError("no answer", "no answer: no message has the role assistant")
    trained = [_is_answer(message) for message in chat]
    for message in chat:
        message.pop("loss", None)
    return Chat(chat, _tools(row.get("tools")), trained)


def map_strings(value: Any, function: Callable[[str], str]) -> Any:
    """A copy of parsed JSON with `function` applied to every string, keys included."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list):
        return [map_strings(item, function) for item in value]
    if isinstance(value, dict):
        return {function(key): map_strings(item, function) for key, item in value.items()}
    return value


def _message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(
            "message is not an object", f"message {number} is {_type_name(message)}, not an object"
        )
    if "role" not in message and "from" in message:
        message = _from_sharegpt(message)
    role = message.get("role")
    if role not in ROLES:
        raise RowError("unknown role", f"unknown role {role} of message {number}")
    result = {**message, "content": _text(message.get("content"), number)}
    if not result.get("tool_calls"):
        result.pop("tool_calls", None)
    elif not isinstance(result["tool_calls"], list):
        raise RowError("tool_calls is not a list", f"tool_calls of message {number} is not a list")
    return result


def _from_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    role, value = message["from"], message.get("value")
    result = {"role": _SHAREGPT_ROLES.get(role, role), "content": value}
    if role == "function_call" and isinstance(value, str):
        try:
            call = json.loads(value)
            function = {"name": call["name"], "arguments": call["arguments"]}
        except (TypeError, ValueError, KeyError):
            return result  # not a call in JSON: an answer in words
        result |= {"content": "", "tool_calls": [{"type": "function", "function": function}]}
    return result


def _text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(
            "content is not text", f"content of message {number} is {_type_name(content)}, not text"
        )
    parts = []
    for part in content:
        is_text_part = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text_part else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else _type_name(part)
            raise RowError(
                "unsupported content part", f"unsupported content part {kind} in message {number}"
            )
        parts.append(text)
    return "".join(parts)


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise RowError("tools is not a list", "tools is neither a list nor JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise RowError("tools is not a list", f"tools is {_type_name(tools)}, not a list")
    return tools


def _is_answer(message: dict[str, Any]) -> bool:
    says_something = (
        message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
    )
    return (
        message["role"] == "assistant"
        and bool(says_something)
        and message.get("loss", True) is not False
    )


def _type_name(value: Any) -> str:
    names = {str: "text", dict: "an object", list: "a list", bool: "a truth value"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
