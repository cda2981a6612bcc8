"""Loads a tokenizer from local files and encodes plain text with it.

A tokenizer is a Hugging Face folder, a tokenizer.json file, or a SentencePiece .model file. Nothing
is fetched and no code of the folder is run.

Guarantees:
- encoding never yields a control token, whatever the text;
- truncation and padding that the file asks for are off;
- text encoded in parts gets no extra leading space where a part continues another one.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
import tokenizers

from megatron_hbp.corpus.control_tokens import ControlToken, ControlTokens

_ACCEPTED = (
    "a Hugging Face folder (with tokenizer.json), a tokenizer.json file or a SentencePiece .model "
    "file"
)
_FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
# Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai, Hangul, Kana, Han, an emoji
_SCRIPTS = "aZ09~\u00e9\u00df\u03bb\u0416\u05d0\u0639\u0905\u0e01\ud55c\u3042\u4e2d\u8a9e\U0001f600"
# appended to a SentencePiece model file, this protobuf field switches the leading space off:
# field 3 (normalizer_spec), two bytes long: field 3 (add_dummy_prefix) = false
_NO_LEADING_SPACE = b"\x1a\x02\x18\x00"


_ERRORS_ONLY = 2  # a log level of SentencePiece


class Place(Enum):
    """Where a part of a text stands; some tokenizers put a space before it accordingly."""

    START = 0
    AFTER_CONTROL_TOKEN = 1
    AFTER_TEXT = 2


class _Encoder(Protocol):
    def encode(self, texts: Sequence[str], places: Sequence[Place]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Tokenizer:
    """path: as the user gave it, made absolute. files: what was read. vocab_size: ids are below it.

    start_id, end_id: None when there is none. adds_start: whether the tokenizer itself puts the
    start token first. chat_template: its own, or None; other_templates: names of those it has
    besides. variables: special tokens' texts by name.
    """

    path: Path
    files: tuple[Path, ...]
    vocab_size: int
    start_id: int | None
    end_id: int | None
    adds_start: bool
    chat_template: str | None
    other_templates: tuple[str, ...]
    variables: Mapping[str, str]
    control_tokens: ControlTokens
    _encoder: _Encoder

    def encode(self, texts: Sequence[str], places: Sequence[Place]) -> list[list[int]]:
        """Token ids of each text; control-token text is encoded as plain text."""
        return self._encoder.encode(texts, places)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids below vocab_size, control tokens by their text.

        Bytes that are no whole character come out as U+FFFD.
        """
        return self._encoder.decode(ids)

    def dropped_characters(self) -> str:
        """Those of a few characters of many scripts that encode to nothing at all."""
        places = [Place.AFTER_TEXT] * len(_SCRIPTS)
        encoded = self.encode(list(_SCRIPTS), places)
        return "".join(char for char, ids in zip(_SCRIPTS, encoded, strict=True) if not ids)


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a tokenizer. ValueError when there is none at `path`, naming what is accepted."""
    path = path.absolute()
    if not path.exists():
        raise ValueError(f"tokenizer {path} does not exist; give {_ACCEPTED}")
    try:
        if path.is_dir():
            return _load_folder(path)
        if path.suffix == ".json":
            return _load_json(path)
        return _load_sentencepiece(path)
    except Exception as error:  # the libraries raise anything on foreign files
        reason = " ".join(str(error).split())
        raise ValueError(
            f"tokenizer {path} cannot be loaded ({reason}); give {_ACCEPTED}"
        ) from None


def _load_folder(folder: Path) -> Tokenizer:
    files = tuple(folder / name for name in _FOLDER_FILES if (folder / name).is_file())
    if not files:
        raise ValueError("no tokenizer file is in the folder")
    # importing transformers takes seconds, which other commands should not
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

    # a tokenizer.json is used as it is: the class named in the configuration may rebuild it
    loader = PreTrainedTokenizerFast if folder / "tokenizer.json" in files else AutoTokenizer
    logging.getLogger("transformers").setLevel(logging.ERROR)
    loaded = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return _from_transformers(loaded, folder, files)


def _load_json(path: Path) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  # as above

    return _from_transformers(PreTrainedTokenizerFast(tokenizer_file=str(path)), path, (path,))


def _from_transformers(loaded: Any, path: Path, files: tuple[Path, ...]) -> Tokenizer:
    if not getattr(loaded, "is_fast", False):
        raise ValueError("it has no tokenizer.json and none can be made from its files")
    special_ids = set(loaded.all_special_ids)
    control = {
        token.content: ControlToken(token_id, token.lstrip, token.rstrip)
        for token_id, token in loaded.added_tokens_decoder.items()
        if token.special or token_id in special_ids
    }
    template, others = loaded.chat_template, ()
    if isinstance(template, dict):
        others = tuple(sorted(template.keys() - {"default"}))
        template = template.get("default")
    start_id = loaded.bos_token_id
    encoder = _FastEncoder(loaded.backend_tokenizer.to_str())
    return Tokenizer(
        path=path,
        files=files,
        vocab_size=max(len(loaded), 1 + max(loaded.get_vocab().values())),
        start_id=start_id,
        end_id=loaded.eos_token_id,
        adds_start=start_id is not None and loaded("x")["input_ids"][:1] == [start_id],
        chat_template=template,
        other_templates=others,
        variables={
            name: text for name, text in loaded.special_tokens_map.items() if isinstance(text, str)
        },
        control_tokens=ControlTokens(control),
        _encoder=encoder,
    )


class _FastEncoder:
    """A tokenizer.json, once as it is and, where that differs, once without leading spaces."""

    def __init__(self, definition: str) -> None:
        self._definition = definition
        parsed = json.loads(definition)
        self._plain = _build_backend(parsed)
        stripped = json.loads(definition)
        only_first = _strip_leading_space(stripped)
        self._joined = self._plain if stripped == parsed else _build_backend(stripped)
        self._joined_places = {Place.AFTER_TEXT}
        if only_first:
            self._joined_places.add(Place.AFTER_CONTROL_TOKEN)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return _FastEncoder, (self._definition,)

    def encode(self, texts: Sequence[str], places: Sequence[Place]) -> list[list[int]]:
        if self._joined is self._plain:
            return _encode_fast(self._plain, texts)
        is_joined = [place in self._joined_places for place in places]
        return _encode_two_ways(
            texts,
            is_joined,
            lambda some: _encode_fast(self._plain, some),
            lambda some: _encode_fast(self._joined, some),
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self._plain.decode(ids, skip_special_tokens=False)


def _encode_fast(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _encode_two_ways(
    texts: Sequence[str],
    is_second: list[bool],
    first: Callable[[list[str]], list[list[int]]],
    second: Callable[[list[str]], list[list[int]]],
) -> list[list[int]]:
    """Ids of each text, by the one encoder or the other, both of which like large batches."""
    pairs = list(zip(texts, is_second, strict=True))
    by_first = iter(first([text for text, other in pairs if not other]))
    by_second = iter(second([text for text, other in pairs if other]))
    return [next(by_second if other else by_first) for other in is_second]


def _build_backend(parsed: dict[str, Any]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # that is, as the plain text they are written in
    return backend


def _strip_leading_space(definition: dict[str, Any]) -> bool:
    """Switches leading spaces off in a parsed tokenizer.json, in place.

    Returns whether one of them was for the start of the text only (Metaspace, "first").
    """
    only_first = False
    for key, plural in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        part = definition.get(key)
        if part is None:
            continue
        items = part[plural] if part["type"] == "Sequence" else [part]
        for item in items:
            only_first |= item.get("prepend_scheme") == "first"
            if "prepend_scheme" in item:
                item["prepend_scheme"] = "never"
            if "add_prefix_space" in item:
                item["add_prefix_space"] = False
        kept = [item for item in items if item["type"] != "Prepend"]
        if len(kept) < len(items):
            definition[key] = {"type": "Sequence", plural: kept}
    return only_first


def _load_sentencepiece(path: Path) -> Tokenizer:
    model = path.read_bytes()
    encoder = _SentencePieceEncoder(model)
    plain = encoder.plain
    control = {
        plain.id_to_piece(i): ControlToken(i)
        for i in range(plain.vocab_size())
        if plain.is_control(i)
    }
    ids = {"bos_token": plain.bos_id(), "eos_token": plain.eos_id(), "pad_token": plain.pad_id()}
    return Tokenizer(
        path=path,
        files=(path,),
        vocab_size=plain.vocab_size(),
        start_id=plain.bos_id() if plain.bos_id() >= 0 else None,
        end_id=plain.eos_id() if plain.eos_id() >= 0 else None,
        adds_start=plain.bos_id() >= 0,
        chat_template=None,
        other_templates=(),
        variables={name: plain.id_to_piece(i) for name, i in ids.items() if i >= 0},
        control_tokens=ControlTokens(control),
        _encoder=encoder,
    )


class _SentencePieceEncoder:
    def __init__(self, model: bytes) -> None:
        self._model = model
        sentencepiece.SetMinLogLevel(_ERRORS_ONLY)  # else odd pieces are told of by every process
        self.plain = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._joined = sentencepiece.SentencePieceProcessor(model_proto=model + _NO_LEADING_SPACE)

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return _SentencePieceEncoder, (self._model,)

    def encode(self, texts: Sequence[str], places: Sequence[Place]) -> list[list[int]]:
        # the switch of the tokenizers library: one thread where there is a process for each core
        alone = os.environ.get("TOKENIZERS_PARALLELISM") == "false"
        threads = 1 if alone else -1
        return _encode_two_ways(
            texts,
            [place is not Place.START for place in places],
            lambda some: self.plain.encode(some, num_threads=threads),
            lambda some: self._joined.encode(some, num_threads=threads),
        )

    def decode(self, ids: Sequence[int]) -> str:
        # the library's own decode leaves out control tokens and the first space
        text = b"".join(map(self._bytes, ids)).decode("utf-8", errors="replace")
        return text.replace("\u2581", " ")

    def _bytes(self, token_id: int) -> bytes:
        piece = self.plain.id_to_piece(token_id)  # a byte's piece is "<0xE4>"
        return bytes([int(piece[3:5], 16)]) if self.plain.is_byte(token_id) else piece.encode()
