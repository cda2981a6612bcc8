"""The demo's corpus: the user's rows or the standard library's, at most so many tokens of them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from examples.stdlib_text import train_tokenizer, write_rows
from megatron_hbp.corpus import Corpus, write_corpus
from megatron_hbp.corpus.prepare import prepare_corpus

SEED = 1234


def demo_corpora(
    output: Path, rows: str | None, tokenizer: str | None, *, longest: int, max_tokens: int
) -> tuple[Corpus, Corpus]:
    """Training and validation corpus of at most max_tokens tokens; rows over `longest` stay out."""
    output.mkdir(parents=True, exist_ok=True)
    if rows is None:
        rows_path = output / "rows.jsonl"
        print(f"rows: {write_rows(rows_path)} of Python's standard library")
    else:
        rows_path = Path(rows)
        if not rows_path.is_file():
            raise ValueError(f"DATA={rows} is not a file; name a .jsonl file of chat rows")
    if tokenizer is None:
        tokenizer = str(train_tokenizer(rows_path, output / "tokenizer"))
    shutil.rmtree(output / "prepared", ignore_errors=True)
    with rows_path.open("rb") as file:
        share = min(0.4, max(0.03, 20 / max(1, sum(1 for _ in file))))  # about 20 rows at least
    prepare_corpus([rows_path], Path(tokenizer), output / "prepared", valid_share=share)
    train = Corpus.open(output / "prepared")
    valid = Corpus.open(output / "prepared" / "valid")
    return (
        _sample(train, output / "train", longest, max_tokens),
        _sample(valid, output / "valid", longest, max(longest, max_tokens // 16)),
    )


def _sample(corpus: Corpus, folder: Path, longest: int, max_tokens: int) -> Corpus:
    lens = np.asarray(corpus.seq_lens)
    order = np.random.default_rng(SEED).permutation(np.flatnonzero(lens <= longest))
    chosen = np.sort(order[np.cumsum(lens[order]) <= max_tokens])
    if len(chosen) == 0:
        raise ValueError(
            f"no row of {corpus.path} has {longest} tokens or less, which is what the demo's "
            "longest level holds; use shorter rows"
        )
    too_long = int((lens > longest).sum())
    print(
        f"{folder.name}: {len(chosen)} of {len(lens)} rows, {int(lens[chosen].sum())} tokens "
        f"({too_long} rows over {longest} tokens and what is beyond {max_tokens} tokens stay out)"
    )

    def sequences() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for i in chosen:
            yield corpus.tokens(int(i)), corpus.mask(int(i))

    shutil.rmtree(folder, ignore_errors=True)
    return write_corpus(
        folder,
        sequences(),
        vocab_size=corpus.vocab_size,
        end_id=corpus.end_id,
        info={"sampled_from": corpus.hash, "tokenizer_path": corpus.tokenizer_path},
    )
