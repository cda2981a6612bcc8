"""`hbp prepare`: files of rows in, a corpus out."""

import argparse
from pathlib import Path

from megatron_hbp.commands.progress import RowProgress, print_line
from megatron_hbp.config import OVERLONG_POLICIES

_DESCRIPTION = """Turns files of rows into a corpus: tokens and masks on disk. A row is a chat
(`messages`, ShareGPT `conversations`), a prompt and its completion (also Alpaca's instruction and
output), or token ids with labels or a mask. Answers of the assistant and their end token are
trained, nothing else. Rows that cannot be used are skipped, counted and listed with file, line and
reason in rejects.jsonl. An interrupted preparation goes on where it stopped. Look at what is
trained first: --show 3."""

_KEYS = {
    "messages": "a list of messages with role and content (or from and value)",
    "prompt": "what is asked, not trained",
    "completion": "what is answered, trained",
    "text": "text that is trained from end to end; only taken when it is named here",
    "tokens": "token ids",
    "labels": "-100 or the token id, for each token",
    "mask": "1 or true for each token to train",
}


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
        metavar="ROWS",
        help="JSON lines, JSON arrays (both also gzipped), Parquet, Arrow; files, folders (also of "
        "`datasets`) and patterns, in order",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR|FILE",
        help="Hugging Face folder, tokenizer.json or SentencePiece .model file",
    )
    parser.add_argument("--output", metavar="DIR", help="the corpus to make")
    parser.add_argument(
        "--show",
        type=int,
        metavar="N",
        help="print the first N rows with what is trained and what is masked, and make nothing",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja chat template (default: the tokenizer's own, else: role, line end, content, "
        "end token)",
    )
    for name, meaning in _KEYS.items():
        parser.add_argument(
            f"--{name}-key", metavar="KEY", help=f"key of a row: {meaning} (default: detected)"
        )
    parser.add_argument(
        "--prompt-format",
        choices=("chat", "text", "rendered"),
        default="chat",
        help="what a prompt and completion of plain text are: a user and an assistant message; "
        "plain text without a template; text rendered already, with control tokens (default chat)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="TOKENS",
        help="tokens a sequence may have (default: any number; `hbp plan` has its own limit)",
    )
    parser.add_argument(
        "--overlong",
        choices=OVERLONG_POLICIES,
        default="error",
        help="what happens to a sequence beyond --max-length: stop, drop it or cut its end off, "
        "the latter two counted (default error)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first bad row instead of skipping it"
    )
    parser.add_argument(
        "--max-reject-share",
        type=float,
        metavar="SHARE",
        help="make no corpus when more than this share of the rows is lost, e.g. 0.01 (default: "
        "any share; above 0.05 the summary begins with it)",
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
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that tokenise (default: one for each core); the corpus is the same",
    )
    parser.set_defaults(func=run)


def run(namespace: argparse.Namespace) -> int:
    """Makes the corpus or shows rows; returns 0. ValueError for what the user can put right."""
    # the tokenizer libraries take a second to import, which other commands should not
    from megatron_hbp.corpus.preparation import REJECTS  # noqa: PLC0415
    from megatron_hbp.corpus.prepare import prepare_corpus  # noqa: PLC0415
    from megatron_hbp.corpus.rows import RowKeys  # noqa: PLC0415
    from megatron_hbp.corpus.summary import summary_text  # noqa: PLC0415

    options = {
        "chat_template": Path(namespace.chat_template) if namespace.chat_template else None,
        "keys": RowKeys(
            **{name: getattr(namespace, f"{name}_key") for name in _KEYS},
            prompt_format=namespace.prompt_format,
        ),
    }
    for name in (
        *("max_length", "overlong", "strict", "max_reject_share"),
        *("valid_share", "valid_seed", "workers"),
    ):
        options[name] = getattr(namespace, name)
    tokenizer = Path(namespace.tokenizer)
    if namespace.show is not None:
        return _show(namespace.input, tokenizer, options, namespace.show)
    if not namespace.output:
        raise ValueError("--output is missing; name the folder of the corpus (or use --show)")
    output = Path(namespace.output)
    with RowProgress() as progress:
        corpus = prepare_corpus(
            namespace.input,
            tokenizer,
            output,
            progress=progress.update,
            report=print_line,
            **options,
        )
    print(summary_text(corpus.info))
    counts = corpus.info["row_counts"]
    if counts["rows_rejected"] + counts["rows_dropped"] + counts["rows_truncated"]:
        print(f"\nrows that lost something are listed in {output / REJECTS}")
    print(f"\ncorpus      {output} ({corpus.hash[:12]})")
    return 0


def _show(inputs: list[str], tokenizer: Path, options: dict, count: int) -> int:
    from rich.console import Console  # noqa: PLC0415

    from megatron_hbp.corpus.options import Options  # noqa: PLC0415
    from megatron_hbp.corpus.prepare import first_rows, load_recipe  # noqa: PLC0415
    from megatron_hbp.corpus.row_encoder import Reject  # noqa: PLC0415
    from megatron_hbp.corpus.rows import RowError  # noqa: PLC0415
    from megatron_hbp.corpus.show import print_legend, print_reject, print_row  # noqa: PLC0415

    if count < 1:
        raise ValueError(f"--show is {count}; it must be at least 1")
    recipe, template_name = load_recipe(tokenizer, Options(**options))

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the program with exit code 1

    console = PlainConsole(soft_wrap=True, highlight=False)
    console.print(f"template: {template_name}", markup=False)
    print_legend(console)
    for where, outcome in first_rows(inputs, recipe, count):
        console.print()
        if isinstance(outcome, Reject):
            print_reject(console, where, RowError(outcome.kind, outcome.reason))
        else:
            print_row(console, where, *outcome, recipe.tokenizer)
    return 0
