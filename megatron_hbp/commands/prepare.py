"""`hbp prepare`: rows of chats in, a corpus out."""

import argparse
import sys
import time
from pathlib import Path

_DESCRIPTION = """Turns JSON-lines files of chats into a corpus: tokens and masks on disk.
A row has `messages` (role, content; roles system, user, assistant, tool; optionally tool_calls and,
per row, tools) or ShareGPT `conversations`. Answers of the assistant and their end token are
trained, nothing else. Rows that cannot be used are skipped, counted and listed with their line and
reason in rejects.jsonl."""
_PROGRESS_SECONDS = 10.0


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers `prepare` with its flags; the parsed namespace's `func` runs it."""
    parser = subparsers.add_parser(
        "prepare", help="tokenise rows of chats into a corpus", description=_DESCRIPTION
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        action="extend",
        metavar="ROWS.jsonl",
        help="files of rows, in order",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR|FILE",
        help="Hugging Face folder, tokenizer.json or SentencePiece .model file",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the corpus to make")
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja chat template (default: the tokenizer's own, else: role, line end, content, "
        "end token)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first bad row instead of skipping it"
    )
    parser.add_argument(
        "--valid-share",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the rows, below 0.5, held out as a second corpus in OUTPUT/valid (default "
        "0). Equal rows stay together",
    )
    parser.add_argument(
        "--valid-seed",
        type=int,
        default=1234,
        metavar="N",
        help="decides which rows are held out (default 1234)",
    )
    parser.set_defaults(func=run)


def run(namespace: argparse.Namespace) -> int:
    """Makes the corpus, prints the summary, returns 0. ValueError for what the user can put right.

    Progress goes to stderr every ten seconds.
    """
    # the tokenizer libraries take a second to import, which other commands should not
    from megatron_hbp.corpus.prepare import REJECTS, prepare_corpus  # noqa: PLC0415
    from megatron_hbp.corpus.summary import RowCounts, summary_text  # noqa: PLC0415

    last = time.monotonic()

    def progress(counts: RowCounts) -> None:
        nonlocal last
        if time.monotonic() - last > _PROGRESS_SECONDS:
            last = time.monotonic()
            print(
                f"{counts.rows_in} rows read, {counts.rows_rejected} rejected",
                file=sys.stderr,
                flush=True,
            )

    output = Path(namespace.output)
    corpus = prepare_corpus(
        [Path(file) for file in namespace.input],
        Path(namespace.tokenizer),
        output,
        chat_template=Path(namespace.chat_template) if namespace.chat_template else None,
        strict=namespace.strict,
        valid_share=namespace.valid_share,
        valid_seed=namespace.valid_seed,
        progress=progress,
    )
    print(summary_text(corpus.info))
    if corpus.info["row_counts"]["rows_rejected"]:
        print(f"\nrejected rows are listed in {output / REJECTS}")
    print(f"\ncorpus      {output} ({corpus.hash[:12]})")
    return 0
