"""Brings each row, JSON text or an object, into one form: a chat, a passage of text, or tokens.

The first of these forms that a row has is taken; keys that the user names replace the detection:
1. a chat: `messages`, `conversations` or `conversation`, and optionally `tools`;
2. a prompt and a completion, by the names in PAIRS; each is a text or a list of messages;
3. token ids: `input_ids` with `labels`, one of MASKS, or several of them;
4. text that is trained from end to end: only where the user names the key.
A key whose value is null counts as missing. Other keys are ignored.

Guarantees:
- a row that cannot be used is a RowError with a reason, never a crash;
- lone surrogates become U+FFFD;
- of a prompt nothing is trained, also where it holds answers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_hbp.corpus.messages import ROLES, Chat, read_chat, read_list
from megatron_hbp.corpus.row_values import RowError, map_strings, parse_json, type_name
from megatron_hbp.corpus.token_rows import ATTENTION_MASK, POSITIONS, TokenRow, read_tokens

__all__ = [
    "ROLES",
    "Chat",
    "Passage",
    "RowError",
    "RowKeys",
    "TokenRow",
    "known_keys",
    "map_strings",
    "parse_row",
]

CHATS = ("messages", "conversations", "conversation")
SYSTEMS = ("system", "system_prompt")
MASKS = ("loss_mask", "assistant_masks", "assistant_tokens_mask", "completion_mask")
PROMPT_FORMATS = ("chat", "text", "rendered")


class Pair(NamedTuple):
    """Keys of a prompt and its completion. contexts: text that follows the prompt, if present."""

    prompt: str
    completion: str
    contexts: tuple[str, ...] = ()


PAIRS = (
    Pair("prompt", "completion"),
    Pair("prompt", "response"),
    Pair("instruction", "output", ("input", "context")),  # Alpaca
    Pair("instruction", "response", ("input", "context")),  # Dolly
    Pair("question", "answer", ("context",)),
    Pair("question", "response", ("context",)),  # OpenOrca, with system_prompt
    Pair("query", "response"),
    Pair("problem", "solution"),
    Pair("inputs", "targets"),
    Pair("input", "output"),
)
_CONTEXTS = {pair.prompt: pair.contexts for pair in PAIRS}


@dataclass(frozen=True)
class RowKeys:
    """Keys that the user named. None: detect; with any of them named, only named forms are taken.

    messages: a chat. prompt, completion: one of them may be left to PAIRS. text: trained from end
    to end. tokens: token ids; labels, mask: what goes with them, each alone or both.
    prompt_format: what a prompt that is text stands for. chat: a user message, and the completion
    an assistant message; text: plain text; rendered: text that may hold control tokens.
    """

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    tokens: str | None = None
    labels: str | None = None
    mask: str | None = None
    prompt_format: str = "chat"

    def __post_init__(self) -> None:
        if self.prompt_format not in PROMPT_FORMATS:
            raise ValueError(
                f"prompt format is {self.prompt_format}; it must be one of "
                f"{', '.join(PROMPT_FORMATS)}"
            )

    @property
    def named(self) -> tuple[str, ...]:
        """The keys that were named."""
        keys = (self.messages, self.prompt, self.completion, self.text)
        return tuple(key for key in (*keys, self.tokens, self.labels, self.mask) if key is not None)


DETECT = RowKeys()


@dataclass(frozen=True)
class Passage:
    """Text without a chat: the completion and an end token are trained, the prompt is not.

    prompt may be "". rendered: the text may hold control tokens; otherwise they are plain text.
    """

    prompt: str
    completion: str
    rendered: bool


def known_keys(keys: RowKeys) -> frozenset[str]:
    """All keys that `parse_row` ever looks at."""
    pairs = (key for pair in PAIRS for key in (pair.prompt, pair.completion, *pair.contexts))
    tokens = ("input_ids", "labels", *MASKS, ATTENTION_MASK, POSITIONS)
    return frozenset((*CHATS, "tools", "history", *SYSTEMS, *pairs, *tokens, *keys.named))


def parse_row(row: bytes | dict[str, Any], keys: RowKeys = DETECT) -> Chat | Passage | TokenRow:
    """What a row trains. row: JSON text, or an object as `blocks.block_rows` gives it.

    Raises RowError.
    """
    if not isinstance(row, dict):
        row = _object(row)
    if not keys.named:
        return _detected(row, keys)
    if keys.messages is not None and row.get(keys.messages) is not None:
        return _chat(row, keys.messages)
    pair = _named_pair(row, keys)
    if pair is not None:
        return _completed(row, pair, keys)
    if keys.tokens is not None or keys.labels is not None or keys.mask is not None:
        tokens_key = keys.tokens or "input_ids"
        if row.get(tokens_key) is not None:
            return _tokens(row, tokens_key, keys)
    if keys.text is not None and row.get(keys.text) is not None:
        return _passage("", _as_text(row[keys.text], keys.text), keys, keys.text)
    raise _no_form(row, keys)


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8", f"not UTF-8: byte {error.start} of the row") from None
    except RecursionError:
        raise RowError("not JSON", "not JSON: nested too deeply") from None
    except ValueError as error:
        raise RowError("not JSON", f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowError("not an object", f"expected an object, found {type_name(row)}")
    return row


def _detected(row: dict[str, Any], keys: RowKeys) -> Chat | Passage | TokenRow:
    for key in CHATS:
        if row.get(key) is not None:
            return _chat(row, key)
    for pair in PAIRS:
        if row.get(pair.prompt) is not None and row.get(pair.completion) is not None:
            return _completed(row, pair, keys)
    if row.get("input_ids") is not None:
        return _tokens(row, "input_ids", keys)
    for key in CHATS:
        if key in row:
            return _chat(row, key)  # whose error says that it is null
    raise _no_form(row, keys)


def _no_form(row: dict[str, Any], keys: RowKeys) -> RowError:
    expected = keys.messages or "messages"
    if keys.named:
        completions = dict.fromkeys(pair.completion for pair in PAIRS)
        prompts = dict.fromkeys(pair.prompt for pair in PAIRS)
        forms = [keys.messages, keys.text]
        if keys.prompt or keys.completion:
            prompt = keys.prompt or f"one of {', '.join(prompts)}"
            completion = keys.completion or f"one of {', '.join(completions)}"
            forms.append(f"{prompt} and {completion}")
        if keys.tokens or keys.labels or keys.mask:
            forms.append(keys.tokens or "input_ids")
        expected = " or ".join(form for form in forms if form is not None)
    return RowError("no known text key", f"expected {expected}, found {_found(row)}")


def _found(row: dict[str, Any]) -> str:
    return ", ".join(row) or "no key"


def _chat(row: dict[str, Any], key: str) -> Chat:
    name = "messages" if key in CHATS else key
    messages = read_list(row[key], name)
    system = _system(row)
    if system and messages and not _is_system(messages[0]):
        messages = [system, *messages]
    return read_chat(messages, row.get("tools"), name=name)


def _system(row: dict[str, Any]) -> dict[str, Any] | None:
    """The system message that stands beside a row's messages or prompt, if any."""
    for key in SYSTEMS:
        if row.get(key) is not None:
            text = _as_text(row[key], key)
            return {"role": "system", "content": text} if text.strip() else None
    return None


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and "system" in (message.get("role"), message.get("from"))


def _named_pair(row: dict[str, Any], keys: RowKeys) -> Pair | None:
    """The pair of a named prompt or completion, if the row has both of its keys."""
    if keys.prompt is None and keys.completion is None:
        return None
    prompts = [keys.prompt] if keys.prompt else [pair.prompt for pair in PAIRS]
    completions = [keys.completion] if keys.completion else [pair.completion for pair in PAIRS]
    for prompt in prompts:
        for completion in completions:
            is_there = row.get(prompt) is not None and row.get(completion) is not None
            if is_there and prompt != completion:
                contexts = [key for key in _CONTEXTS.get(prompt, ()) if key != completion]
                return Pair(prompt, completion, tuple(contexts))
    return None


def _completed(row: dict[str, Any], pair: Pair, keys: RowKeys) -> Chat | Passage:
    prompt, completion = row[pair.prompt], row[pair.completion]
    history = row.get("history")
    if history is not None and not (isinstance(history, (list, str)) and not history):
        raise RowError(
            "history is not supported", "history is not supported: give the turns as messages"
        )
    if not isinstance(prompt, list):
        prompt = _as_text(prompt, pair.prompt)
        for key in pair.contexts:
            context = _as_text(row[key], key) if row.get(key) is not None else ""
            if context.strip():
                prompt = f"{prompt}\n\n{context}" if prompt.strip() else context
        if keys.prompt_format != "chat" and not isinstance(completion, list):
            return _passage(prompt, _as_text(completion, pair.completion), keys, pair.completion)
        if not prompt.strip():
            raise RowError("no prompt", f"no prompt: {pair.prompt} is empty")
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(completion, list):
        completion = _as_text(completion, pair.completion)
        if not completion.strip():
            raise RowError("no answer", f"no answer: {pair.completion} is empty")
        completion = [{"role": "assistant", "content": completion}]
    system = _system(row)
    if system and not (prompt and _is_system(prompt[0])):
        prompt = [system, *prompt]
    return read_chat([*prompt, *completion], row.get("tools"), num_context=len(prompt))


def _passage(prompt: str, completion: str, keys: RowKeys, key: str) -> Passage:
    if not completion.strip():
        kind = "no text" if key == keys.text else "no answer"
        raise RowError(kind, f"{kind}: {key} is empty")
    return Passage(prompt, completion, keys.prompt_format == "rendered")


def _as_text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{key} is not text", f"{key} is {type_name(value)}, not text")
    return value


def _tokens(row: dict[str, Any], key: str, keys: RowKeys) -> TokenRow:
    labels, masks = keys.labels, [keys.mask] if keys.mask is not None else []
    for named in (labels, *masks):
        if named is not None and row.get(named) is None:
            raise RowError("no known text key", f"expected {key} and {named}, found {_found(row)}")
    if labels is None and not masks:
        labels = "labels" if row.get("labels") is not None else None
        masks = [mask for mask in MASKS if row.get(mask) is not None]
        if labels is None and not masks:
            raise RowError(
                "no labels",
                f"{key} without labels or a mask: nothing says which tokens are to be trained",
            )
    return read_tokens(row, key, labels, masks)
