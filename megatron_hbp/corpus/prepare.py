"""Files of rows -> corpus: reads blocks of rows, has them encoded on all cores, stores the result.

Guarantees:
- rows in == rows kept + rejected + dropped, and tokens in == kept + dropped + truncated; each row
  that lost something is a line of rejects.jsonl with its file, line and reason;
- rows stay in input order; the same inputs give the same files, byte for byte, whatever the number
  of workers and however often the making was interrupted;
- memory does not grow with the input;
- the output appears whole or not at all; an output of the same inputs is left alone; of several
  makers of one output one works and the others wait.
"""

import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp.claim import built_once
from megatron_hbp.corpus.blocks import block_rows, read_blocks
from megatron_hbp.corpus.counts import RowCounts
from megatron_hbp.corpus.document import exists_error, read_document
from megatron_hbp.corpus.indexed_files import file_hash
from megatron_hbp.corpus.inputs import InputFile, find_inputs
from megatron_hbp.corpus.options import Options
from megatron_hbp.corpus.preparation import (
    REJECTS,
    VALID_FOLDER,
    Preparation,
    Progress,
    UselessWorkError,
    too_much_lost,
)
from megatron_hbp.corpus.row_encoder import Recipe, Reject, RowEncoder
from megatron_hbp.corpus.rows import known_keys
from megatron_hbp.corpus.store import Corpus
from megatron_hbp.corpus.template import DEFAULT_TEMPLATE, ChatTemplate
from megatron_hbp.corpus.tokenizer import Tokenizer, load_tokenizer

# raise it whenever the same inputs give other tokens or masks than before
RECIPE_VERSION = 3
_LIBRARIES = ("tokenizers", "sentencepiece", "jinja2")


def prepare_corpus(
    inputs: Sequence[Path | str],
    tokenizer_path: Path,
    output: Path,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
    report: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Corpus:
    """Makes a corpus from files of rows and opens it.

    inputs: files, folders and globs, see inputs.py. options: see Options. progress: called after
    each block. report: takes lines for the user. An interrupted making goes on where it stopped.
    Raises ValueError for whatever a user can put right.
    """
    chosen = Options(**options)
    if output.is_symlink() or output.name in ("", ".."):
        output = output.resolve()  # a folder takes its name, which must be there to take
    if not output.name:
        raise exists_error(output)
    files = find_inputs(inputs)
    recipe, template_name = load_recipe(tokenizer_path, chosen)
    stamps = [_stamp(file) for file in files]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        hashes = list(threads.map(file_hash, (file.path for file in files)))
    origin = _origin(recipe, hashes, files)
    work = Preparation(
        options=chosen,
        recipe=recipe,
        files=files,
        output=output,
        origin=origin,
        info={
            "inputs": [
                {"file": str(file.path), "bytes": file.size, "sha256": digest}
                for file, digest in zip(files, hashes, strict=True)
            ],
            "tokenizer_path": str(recipe.tokenizer.path),
            "chat_template": template_name,
        },
        check_unchanged=lambda: _check_unchanged(files, stamps),
        progress=progress,
        report=report,
    )
    try:
        corpus = built_once(
            output,
            lambda: _existing(output, origin, chosen),
            work.run,
            timeout_seconds=float("inf"),
            time_out=ValueError,
            report=lambda words: report(f"{words}, which makes {output}"),
        )
    except OSError as error:
        raise ValueError(
            f"output {output} cannot be used ({error.strerror or error}); see to that, or name "
            "another folder"
        ) from None
    work.clear()
    return corpus


def load_recipe(tokenizer_path: Path, options: Options) -> tuple[Recipe, str]:
    """What decides which sequence a row becomes, and where its chat template is from."""
    tokenizer = load_tokenizer(tokenizer_path)
    source, name = _template_source(tokenizer, options.chat_template)
    template = ChatTemplate(source, tokenizer.variables, tokenizer.control_tokens)
    recipe = Recipe(
        tokenizer=tokenizer,
        template=source,
        end_id=_end_id(tokenizer, template),
        keys=options.keys,
        max_length=options.max_length,
        overlong=options.overlong,
        valid_share=options.valid_share,
        valid_seed=options.valid_seed,
    )
    return recipe, name


def first_rows(
    inputs: Sequence[Path | str], recipe: Recipe, count: int
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray] | Reject]]:
    """Yields (where, tokens and mask) of the first rows, or why one is not kept; see RowEncoder."""
    encoder = RowEncoder(recipe)
    rows = (
        (f"{file.path}:{number}", number, row)
        for file in find_inputs(inputs)
        for block in read_blocks(file, target_bytes=1 << 16, columns=known_keys(recipe.keys))
        for number, row in block_rows(block)
        if row != b""
    )
    for where, number, row in islice(rows, count):
        yield where, encoder.encode_row(number, row)


def _origin(recipe: Recipe, hashes: list[str], files: Sequence[InputFile]) -> dict[str, Any]:
    """Everything that decides the corpus; paths and the number of workers do not."""
    return {
        "recipe_version": RECIPE_VERSION,
        "release": importlib.metadata.version("megatron_hbp"),
        "library_versions": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "input_hashes": hashes,
        "input_kinds": [file.kind for file in files],
        "tokenizer_hashes": {file.name: file_hash(file) for file in recipe.tokenizer.files},
        "chat_template_hash": hashlib.sha256(recipe.template.encode()).hexdigest(),
        "keys": {name: value for name, value in asdict(recipe.keys).items() if value is not None},
        "max_length": recipe.max_length,
        "overlong": recipe.overlong if recipe.max_length is not None else None,
        "valid_share": recipe.valid_share,
        "valid_seed": recipe.valid_seed if recipe.valid_share else None,
    }


def _check_origin(output: Path, there: Any, origin: dict[str, Any]) -> None:
    """Raises ValueError, with what differs, unless a corpus is of this origin."""
    if not isinstance(there, dict):  # not made by `hbp prepare`
        raise exists_error(output)
    names = [name for name in (origin | there) if origin.get(name) != there.get(name)]
    if names:
        raise exists_error(output, f"other {', '.join(names).replace('_', ' ')}")


def _stamp(file: InputFile) -> tuple[int, int]:
    status = file.path.stat()
    return status.st_size, status.st_mtime_ns


def _check_unchanged(files: Sequence[InputFile], stamps: list[tuple[int, int]]) -> None:
    for file, stamp in zip(files, stamps, strict=True):
        try:
            same = _stamp(file) == stamp
        except OSError:
            same = False
        if not same:
            raise UselessWorkError(
                f"input {file.path} was changed while it was read; prepare it again"
            )


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


def _existing(output: Path, origin: dict[str, Any], options: Options) -> Corpus | None:
    """The corpus at `output` if it is whole and of this origin; ValueError if another is there.

    Also where it lost more rows than the options allow, which are not part of the origin.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    try:
        document = read_document(output)
    except ValueError:
        raise exists_error(output) from None
    _check_origin(output, document.get("origin"), origin)
    try:
        if origin["valid_share"]:
            Corpus.open(output / VALID_FOLDER)
        corpus = Corpus.open(output)
    except ValueError:
        raise exists_error(output) from None
    counts = RowCounts(**corpus.info["row_counts"])
    if options.strict and counts.lost_share:
        raise ValueError(
            f"the corpus in {output} was made without --strict and lost rows "
            f"({counts.reasons_text()}); {output / REJECTS} lists them; mend them, or leave "
            "--strict out"
        )
    if options.max_reject_share is not None and counts.lost_share > options.max_reject_share:
        raise ValueError(
            too_much_lost(counts.lost_share, counts.reasons_text(), options)
            + f" {output / REJECTS} lists them; mend them, or raise the share"
        )
    return corpus
