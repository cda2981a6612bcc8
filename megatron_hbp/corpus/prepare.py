"""Rows -> corpus: reads, renders, encodes and stores, a batch of rows at a time.

Guarantees:
- rows in == rows kept + rows rejected; each rejected row is a line of rejects.jsonl with its file,
  line and reason;
- rows stay in input order; the same inputs give the same token files, byte for byte;
- memory does not grow with the input, but for a few numbers per row;
- the output appears whole or not at all; an output of the same inputs is left alone.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megatron_hbp.corpus.encode import encode_chats
from megatron_hbp.corpus.indexed_files import file_hash
from megatron_hbp.corpus.rows import RowError, parse_row, read_lines
from megatron_hbp.corpus.store import (
    Corpus,
    CorpusWriter,
    exists_error,
    read_document,
    staged_folder,
)
from megatron_hbp.corpus.summary import RowCounts, length_summary
from megatron_hbp.corpus.template import DEFAULT_TEMPLATE, ChatTemplate, RenderedChat
from megatron_hbp.corpus.tokenizer import Tokenizer, load_tokenizer

# raise it whenever the same inputs give other tokens or masks than before
RECIPE_VERSION = 1
VALID_FOLDER = "valid"
REJECTS = "rejects.jsonl"
_LIBRARIES = ("tokenizers", "sentencepiece", "jinja2")
_BATCH_ROWS = 512
_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class _Row:
    file: Path
    line: int
    chat: RenderedChat | RowError

    def __len__(self) -> int:
        return len(self.chat.text) if isinstance(self.chat, RenderedChat) else 0


def prepare_corpus(
    inputs: Sequence[Path],
    tokenizer_path: Path,
    output: Path,
    *,
    chat_template: Path | None = None,
    strict: bool = False,
    valid_share: float = 0.0,
    valid_seed: int = 1234,
    progress: Callable[[RowCounts], None] = lambda _: None,
) -> Corpus:
    """Makes a corpus from files of rows and opens it.

    chat_template: a file with a Jinja template (default: the tokenizer's own, else a built-in one).
    strict: stop at the first bad row. valid_share: share of the kept rows, 0 to 0.5, that goes to a
    second corpus in the folder `valid` of the output; equal rows stay together. progress: called
    after each batch. Raises ValueError for whatever a user can put right.
    """
    if not 0 <= valid_share < 0.5:
        raise ValueError(f"valid share is {valid_share}; it must be at least 0 and below 0.5")
    sources = [_source(path) for path in inputs]
    tokenizer = load_tokenizer(tokenizer_path)
    source_text, template_name = _template_source(tokenizer, chat_template)
    template = ChatTemplate(source_text, tokenizer.variables, tokenizer.control_tokens)
    end_id = _end_id(tokenizer, template)
    origin = {
        "recipe_version": RECIPE_VERSION,
        "library_versions": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "input_hashes": [source["sha256"] for source in sources],
        "tokenizer_hashes": {file.name: file_hash(file) for file in tokenizer.files},
        "chat_template_hash": hashlib.sha256(source_text.encode()).hexdigest(),
        "valid_share": valid_share,
        "valid_seed": valid_seed if valid_share else None,
    }
    existing = _existing(output, origin)
    if existing is not None:
        return existing

    counts = RowCounts()
    with ExitStack() as stack:
        folder = stack.enter_context(staged_folder(output))
        writers = [_writer(stack, folder, tokenizer, end_id)]
        if valid_share:
            (folder / VALID_FOLDER).mkdir()
            writers.append(_writer(stack, folder / VALID_FOLDER, tokenizer, end_id))
        rejects = stack.enter_context((folder / REJECTS).open("w", encoding="utf-8"))
        for batch in _batches(_rows(inputs, template, counts)):
            chats = [row.chat for row in batch if isinstance(row.chat, RenderedChat)]
            encoded = iter(encode_chats(chats, tokenizer))
            for row in batch:
                result = next(encoded) if isinstance(row.chat, RenderedChat) else row.chat
                if isinstance(result, RowError):
                    _reject(row, result, counts, rejects, strict=strict)
                    continue
                held_out = _draw(result[0], valid_seed) < valid_share
                writers[held_out].add(*result)
                counts.rows_kept += 1
                counts.rows_held_out += held_out
            progress(counts)
        _check_counts(counts, inputs, valid_share)
        info = {
            "origin": origin,
            "inputs": sources,
            "row_counts": counts.as_dict(),
            "tokenizer_path": str(tokenizer.path),
            "chat_template": template_name,
            "notes": _notes(tokenizer, template),
        }
        for writer in writers:
            writer.finish({**info, "lengths": length_summary(writer.seq_lens)})
    return Corpus.open(output)


def _source(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"input {path} is not a file; give JSON-lines files")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"input {path} is empty; give a file with one JSON object per line")
    return {"file": str(path), "bytes": size, "sha256": file_hash(path)}


def _template_source(tokenizer: Tokenizer, path: Path | None) -> tuple[str, str]:
    """(Jinja text, where it is from)."""
    if path is not None:
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"chat template {path} cannot be read ({error})") from None
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template, "the tokenizer's own"
    if tokenizer.end_id is None:
        raise ValueError(
            f"tokenizer {tokenizer.path} has neither a chat template nor an end token, so answers "
            "could not end; give its whole folder, or a template that ends answers with one of its "
            "control tokens with --chat-template"
        )
    return DEFAULT_TEMPLATE, "built-in (the tokenizer has none): role, line end, content, end token"


def _end_id(tokenizer: Tokenizer, template: ChatTemplate) -> int:
    if tokenizer.end_id is not None:
        return tokenizer.end_id
    if template.end_token is None:
        raise ValueError(
            f"tokenizer {tokenizer.path} has no end token and the chat template cannot render a "
            "plain question and answer to show one; use a tokenizer with an end token"
        )
    return tokenizer.control_tokens.by_text[template.end_token].id


def _existing(output: Path, origin: dict[str, Any]) -> Corpus | None:
    """The corpus at `output` if it is whole and of this origin; ValueError if another is there."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    try:
        if read_document(output).get("origin") == origin:
            if origin["valid_share"]:
                Corpus.open(output / VALID_FOLDER)
            return Corpus.open(output)
    except ValueError:
        pass
    raise exists_error(output)


def _writer(stack: ExitStack, folder: Path, tokenizer: Tokenizer, end_id: int) -> CorpusWriter:
    return stack.enter_context(CorpusWriter(folder, vocab_size=tokenizer.vocab_size, end_id=end_id))


def _rows(inputs: Sequence[Path], template: ChatTemplate, counts: RowCounts) -> Iterator[_Row]:
    for path in inputs:
        for number, line in read_lines(path):
            if not line:
                counts.blank_lines += 1
                continue
            counts.rows_in += 1
            try:
                yield _Row(path, number, template.render(parse_row(line)))
            except RowError as error:
                yield _Row(path, number, error)


def _batches(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row)
        if len(batch) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _reject(
    row: _Row, error: RowError, counts: RowCounts, rejects: TextIO, *, strict: bool
) -> None:
    if strict:
        raise ValueError(
            f"{row.file}:{row.line}: {error}; mend the row, or leave --strict out to skip such rows"
        )
    counts.reject(error.kind)
    entry = {"file": str(row.file), "line": row.line, "reason": str(error)}
    rejects.write(json.dumps(entry) + "\n")


def _draw(tokens: np.ndarray, seed: int) -> float:
    """A number in [0, 1) from a sequence and the seed; equal sequences draw equal numbers."""
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest) / 2**64


def _check_counts(counts: RowCounts, inputs: Sequence[Path], valid_share: float) -> None:
    assert counts.rows_in == counts.rows_kept + counts.rows_rejected
    files = ", ".join(map(str, inputs))
    if counts.rows_in == 0:
        raise ValueError(f"{files}: only blank lines; give files with one JSON object per line")
    if counts.rows_kept == 0:
        raise ValueError(
            f"{files}: all {counts.rows_in} rows were rejected: {counts.reasons_text()}; "
            "--strict shows the first one"
        )
    if valid_share and counts.rows_held_out in (0, counts.rows_kept):
        raise ValueError(
            f"a valid share of {valid_share} puts {counts.rows_held_out} of {counts.rows_kept} "
            "rows into the valid corpus; change --valid-share or --valid-seed"
        )


def _notes(tokenizer: Tokenizer, template: ChatTemplate) -> list[str]:
    notes = []
    if not template.prints_tool_calls:
        notes.append("the chat template does not print tool calls, so they are not trained")
    dropped = tokenizer.dropped_characters()
    if dropped:
        notes.append(f"the tokenizer drops characters without a trace, e.g. {dropped}")
    return notes
