"""Messages of a chat, in one form from many.

A message has a role and a content (or ShareGPT's from and value), optionally tool_calls,
reasoning_content and name. An assistant message with `"loss": false` (or 0) or `"weight": 0`
is context only.

Guarantees:
- a missing, null or empty content are the same;
- what cannot be used is a RowError.
"""

from dataclasses import dataclass
from typing import Any

from megatron_hbp.corpus.row_values import RowError, parse_json, type_name

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    **{role: role for role in ROLES},
}


@dataclass(frozen=True)
class Chat:
    """messages: dicts with a known role and a text content, at least one of them an answer.

    tools: what the chat template gets as `tools`. trained: per message, whether it is an answer to
    train on (an assistant message that says something and is not marked `"loss": false` or
    `"weight": 0`).
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    trained: list[bool]


def read_chat(messages: Any, tools: Any, *, name: str = "messages", num_context: int = 0) -> Chat:
    """A chat from a list of messages, or from JSON text of one.

    name: what messages of errors call the list. num_context: so many messages at the start are
    never trained. Raises RowError.
    """
    messages = read_list(messages, name)
    if not messages:
        raise RowError("no messages" if name == "messages" else f"no {name}")
    chat, trained, has_answer = [], [], False
    for number, given in enumerate(messages, start=1):
        message = _message(given, number)
        is_answer = message["role"] == "assistant" and number > num_context
        has_answer |= is_answer
        trained.append(is_answer and _is_to_train(message))
        message.pop("loss", None)
        message.pop("weight", None)
        chat.append(message)
    if not has_answer:
        raise RowError("no answer", "no answer: no message has the role assistant")
    return Chat(chat, _read_tools(tools) if tools is not None else None, trained)


def read_list(value: Any, name: str) -> list[Any]:
    """A list, given as one or as JSON text of one. Raises RowError."""
    items = value
    if isinstance(value, str):
        try:
            items = parse_json(value)
        except (ValueError, RecursionError):
            items = value
    if not isinstance(items, list):
        raise RowError(f"{name} is not a list", f"{name} is {type_name(value)}, not a list")
    return items


def _message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(
            "message is not an object", f"message {number} is {type_name(message)}, not an object"
        )
    if "role" not in message and "from" in message:
        message = _from_sharegpt(message)
    role = message.get("role")
    if role not in ROLES:
        raise RowError("unknown role", f"unknown role {_shown(role)} of message {number}")
    content = message.get("content")
    if type(content) is not str:
        content = _text(content, number)
    result = {**message, "content": content}
    if "tool_calls" in result:
        if result["tool_calls"]:
            result["tool_calls"] = _tool_calls(result["tool_calls"], number)
        else:
            del result["tool_calls"]
    return result


def _shown(name: Any) -> str:
    return str(name) if name is None or isinstance(name, str) else type_name(name)


def _tool_calls(calls: Any, number: int) -> list[Any]:
    try:
        return read_list(calls, "tool_calls")
    except RowError as error:
        text = f"tool_calls of message {number} is not a list"
        raise RowError(error.kind, text) from None


def _from_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    role, value = message["from"], message.get("value")
    others = {key: item for key, item in message.items() if key not in ("from", "value")}
    known = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    result = {"role": known, "content": value, **others}
    if role == "function_call" and isinstance(value, str):
        try:
            call = parse_json(value)
            function = {"name": call["name"], "arguments": call["arguments"]}
        except (TypeError, ValueError, KeyError, RecursionError):
            return result  # not a call in JSON: an answer in words
        result |= {"content": "", "tool_calls": [{"type": "function", "function": function}]}
    return result


def _text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if not isinstance(content, list):
        raise RowError(
            "content is not text", f"content of message {number} is {type_name(content)}, not text"
        )
    parts = []
    for part in content:
        is_text_part = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text_part else part
        if not isinstance(text, str):
            kind = _shown(part.get("type")) if isinstance(part, dict) else type_name(part)
            raise RowError(
                "unsupported content part", f"unsupported content part {kind} in message {number}"
            )
        parts.append(text)
    return "".join(parts)


def _read_tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = parse_json(tools) if tools.strip() else []
        except (ValueError, RecursionError):
            raise RowError("tools is not a list", "tools is neither a list nor JSON") from None
    if tools is None or isinstance(tools, list):
        return tools or None
    if isinstance(tools, (dict, bool, int, float)) and not tools:
        return None
    raise RowError("tools is not a list", f"tools is {type_name(tools)}, not a list")


def _is_to_train(answer: dict[str, Any]) -> bool:
    weight = answer.get("weight", 1)
    if weight not in (0, 1, None):
        raise RowError("weight is not 0 or 1", f"weight {weight} of an answer is neither 0 nor 1")
    loss = answer.get("loss")
    if loss not in (True, False, None):
        raise RowError(
            "loss is not true or false", f"loss {loss} of an answer is neither true nor false"
        )
    if 0 in (loss, weight):  # as False is
        return False
    return bool(
        answer["content"].strip() or answer.get("tool_calls") or answer.get("reasoning_content")
    )
