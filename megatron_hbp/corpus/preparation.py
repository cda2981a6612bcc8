"""One making of a corpus: blocks of rows in, encoded on all cores, stored, accounted for.

Guarantees:
- what is on the disk at a checkpoint is what a making from there on needs, and no more; it is kept
  whatever interrupts the making, unless it is of no use (UselessWorkError);
- rows in == rows kept + rejected + dropped, and tokens in == kept + dropped + truncated, or the
  corpus is not published.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_hbp.corpus.blocks import START, Block, Position, read_blocks
from megatron_hbp.corpus.counts import RowCounts
from megatron_hbp.corpus.encoder_pool import EncoderPool
from megatron_hbp.corpus.indexed_files import ChangedFileError, HashingFile
from megatron_hbp.corpus.inputs import InputFile
from megatron_hbp.corpus.options import Options
from megatron_hbp.corpus.row_encoder import OVERLONG, EncodedBlock, Recipe
from megatron_hbp.corpus.rows import known_keys
from megatron_hbp.corpus.template import ChatTemplate
from megatron_hbp.corpus.unfinished import UnfinishedFolder
from megatron_hbp.corpus.writer import CorpusWriter, publish

VALID_FOLDER = "valid"
REJECTS = "rejects.jsonl"
_CHECKPOINT_SECONDS = 5.0
_BLOCK_BYTES = 1 << 20
_SMALL = 4 << 20  # bytes of input that are not worth starting processes for


@dataclass(frozen=True)
class Progress:
    """bytes_read of bytes_total of the input files are dealt with."""

    bytes_read: int
    bytes_total: int
    counts: RowCounts


class UselessWorkError(ValueError):
    """What was made is worth nothing to a later making either, e.g. as an input was changed."""


@dataclass(kw_only=True)
class Preparation:
    """One making of one corpus, by the process that holds the claim on it.

    origin, info: entries of corpus.json. check_unchanged: raises UselessWorkError. progress: called
    after each block. report: takes lines for the user.
    """

    options: Options
    recipe: Recipe
    files: Sequence[InputFile]
    output: Path
    origin: dict[str, Any]
    info: dict[str, Any]
    check_unchanged: Callable[[], None]
    progress: Callable[[Progress], None]
    report: Callable[[str], None]

    def __post_init__(self) -> None:
        # rejects.jsonl names the inputs by their paths
        paths = {"input_paths": [str(file.path) for file in self.files]}
        self._unfinished = UnfinishedFolder(self.output, self.origin | paths)
        self._counts = RowCounts()
        self._input = 0  # the file that the next block is of
        self._position = START

    def run(self) -> None:
        """Makes the corpus, from the last checkpoint on if there is one."""
        try:
            self._run()
        except UselessWorkError:
            self._unfinished.remove()
            raise
        except OSError as error:
            raise ValueError(
                f"{self.output} cannot be written ({error.strerror or error}); see to that, then "
                f"give the same command again: {self._what_is_kept()}"
            ) from None
        except KeyboardInterrupt:
            self.report(f"interrupted: {self._what_is_kept()}")
            raise
        except ChangedFileError:
            raise  # what is there now is another process's
        except BaseException:
            self._what_is_kept()
            raise

    def clear(self) -> None:
        """Removes what an interrupted making left; for when the corpus is there."""
        self._unfinished.remove()

    def _what_is_kept(self) -> str:
        if self._unfinished.has_checkpoint():
            return f"the same command goes on from the work kept in {self._unfinished.root}"
        self._unfinished.remove()
        return "it starts anew, nothing was done yet"

    def _run(self) -> None:
        state = self._unfinished.open(self.report)
        folder = self._unfinished.corpus
        with ExitStack() as stack:
            try:
                writers, rejects = self._open_files(stack, folder, state)
            except ChangedFileError as error:
                self.report(f"{error}; starts anew")
                self._unfinished.start_anew()
                state = None
                writers, rejects = self._open_files(stack, folder, state)
            if state is not None:
                self._counts = RowCounts(**state["counts"])
                self._input, self._position = state["input"], Position(**state["position"])
                self.report(f"goes on after {self._counts.rows_in} rows of an earlier run")
                self._check_rejects(folder / REJECTS)
            else:
                for writer in writers:
                    writer.start_input()
            pool = stack.enter_context(EncoderPool(self.recipe, self._num_workers()))
            self._encode(pool, writers, rejects)
            self._save(writers, rejects)
            self.check_unchanged()
            self._check_counts(writers)
            info = {
                "origin": self.origin,
                **self.info,
                "row_counts": self._counts.as_dict(),
                "notes": _notes(self.recipe, self._counts),
            }
            for writer in writers:
                writer.finish(info)
        publish(folder, self.output)

    def _open_files(
        self, stack: ExitStack, folder: Path, state: dict[str, Any] | None
    ) -> tuple[list[CorpusWriter], HashingFile]:
        folders = [folder]
        if self.options.valid_share:
            folders.append(folder / VALID_FOLDER)
            folders[1].mkdir(exist_ok=True)
        writers = [
            stack.enter_context(
                CorpusWriter(
                    place,
                    vocab_size=self.recipe.tokenizer.vocab_size,
                    end_id=self.recipe.end_id,
                    records=self._unfinished.work / f"{index}.columns",
                    resume=state["writers"][index] if state else None,
                )
            )
            for index, place in enumerate(folders)
        ]
        rejects = HashingFile(folder / REJECTS, state["rejects"] if state else None)
        stack.callback(rejects.abandon)
        return writers, rejects

    def _num_workers(self) -> int:
        if self.options.workers is not None:
            return self.options.workers
        if sum(file.size for file in self.files) < _SMALL:
            return 1
        return len(os.sched_getaffinity(0))

    def _encode(self, pool: EncoderPool, writers: list[CorpusWriter], rejects: HashingFile) -> None:
        total = sum(file.size for file in self.files)
        saved = time.monotonic()
        for (index, block), encoded in pool.encode(self._blocks()):
            while self._input < index:
                self._input += 1
                for writer in writers:
                    writer.start_input()
            self._store(encoded, writers, rejects)
            self._position = block.end
            before = sum(file.size for file in self.files[:index])
            self.progress(Progress(before + block.read, total, self._counts))
            if time.monotonic() - saved > _CHECKPOINT_SECONDS:
                self._save(writers, rejects)
                saved = time.monotonic()
        while self._input < len(self.files) - 1:  # files without a row at the end
            self._input += 1
            self._position = START
            for writer in writers:
                writer.start_input()

    def _blocks(self) -> Iterator[tuple[int, Block]]:
        start = self._position
        for index in range(self._input, len(self.files)):
            columns = known_keys(self.recipe.keys)
            for block in read_blocks(self.files[index], start, _BLOCK_BYTES, columns):
                yield index, block
            start = START

    def _store(
        self, encoded: EncodedBlock, writers: list[CorpusWriter], rejects: HashingFile
    ) -> None:
        file = self.files[self._input].path
        for reject in encoded.rejects:
            if reject.kind == OVERLONG and self.options.overlong == "error":
                raise UselessWorkError(
                    f"{file}:{reject.row}: {reject.reason}; use --overlong drop or --overlong "
                    "truncate, both counted, or raise --max-length"
                )
            entry = {"file": str(file), "line": reject.row, "action": reject.action}
            entry |= {"reason": reject.reason} | (
                {"tokens": reject.tokens} if reject.tokens else {}
            )
            self._check_reject(entry)
            rejects.write((json.dumps(entry) + "\n").encode())
        self._counts.add(encoded)
        writers[0].add(encoded.kept)
        if len(encoded.held_out):
            writers[1].add(encoded.held_out)

    def _check_reject(self, entry: dict[str, Any]) -> None:
        if self.options.strict and entry["action"] != "truncated":
            raise ValueError(
                f"{entry['file']}:{entry['line']}: {entry['reason']}; mend the row, or leave "
                "--strict out to skip such rows"
            )

    def _check_rejects(self, path: Path) -> None:
        """Of an earlier run, which may have been less strict."""
        if self.options.strict:
            with path.open(encoding="ascii") as lines:
                for line in lines:
                    self._check_reject(json.loads(line))

    def _save(self, writers: list[CorpusWriter], rejects: HashingFile) -> None:
        self._unfinished.save(
            {
                "writers": [writer.checkpoint() for writer in writers],
                "rejects": rejects.sync(),
                "counts": asdict(self._counts),
                "input": self._input,
                "position": asdict(self._position),
            }
        )

    def _check_counts(self, writers: list[CorpusWriter]) -> None:
        counts, options = self._counts, self.options
        assert counts.rows_in == counts.rows_kept + counts.rows_rejected + counts.rows_dropped
        assert counts.tokens_in == (
            counts.tokens_kept + counts.tokens_dropped + counts.tokens_truncated
        )
        assert sum(map(len, writers)) == counts.rows_kept
        files = ", ".join(str(file.path) for file in self.files[:3])
        if len(self.files) > 3:
            files += f" and {len(self.files) - 3} more"
        if counts.rows_in == 0:
            raise UselessWorkError(
                f"{files}: no row at all; give files with one JSON object per line"
            )
        if counts.rows_kept == 0:
            raise UselessWorkError(
                f"{files}: all {counts.rows_in} rows were lost: {counts.reasons_text()}; "
                "--strict shows the first one"
            )
        if options.max_reject_share is not None and counts.lost_share > options.max_reject_share:
            raise ValueError(
                too_much_lost(counts.lost_share, counts.reasons_text(), options)
                + f" {self._unfinished.corpus / REJECTS} lists them; mend them, or raise the "
                "share: the work done is kept"
            )
        if options.valid_share and counts.rows_held_out in (0, counts.rows_kept):
            raise UselessWorkError(
                f"a valid share of {options.valid_share} puts {counts.rows_held_out} of "
                f"{counts.rows_kept} rows into the valid corpus; change --valid-share or "
                "--valid-seed"
            )


def too_much_lost(share: float, reasons: str, options: Options) -> str:
    """The start of a message on --max-reject-share."""
    return (
        f"{share:.2%} of the rows were lost ({reasons}), more than --max-reject-share "
        f"{options.max_reject_share:g} allows;"
    )


def _notes(recipe: Recipe, counts: RowCounts) -> list[str]:
    notes = []
    tokenizer = recipe.tokenizer
    if counts.forms.get("chats"):
        template = ChatTemplate(recipe.template, tokenizer.variables, tokenizer.control_tokens)
        if not template.prints_tool_calls:
            notes.append("the chat template does not print tool calls, so they are not trained")
        if tokenizer.other_templates and recipe.template == tokenizer.chat_template:
            names = ", ".join(tokenizer.other_templates)
            notes.append(f"the tokenizer's other chat templates ({names}) are not used")
    dropped = tokenizer.dropped_characters()
    if dropped:
        notes.append(f"the tokenizer drops characters without a trace, e.g. {dropped}")
    return notes
