"""`hbp prepare` beside the bare tokenizer on the same rows and cores: make bench-corpus.

The bare tokenizer gets the rendered texts of the same rows, in memory, in large batches, with its
library's own threads, and only has to give ids back. `hbp prepare` reads, parses, renders, masks,
tokenises, checks, hashes and writes. Both use all cores; the best of a few turns each, one after
the other, is compared. The bar is for the mixture of long and short rows, with the two BPE
tokenizers; short rows, and a unigram model of 2,000 pieces, which is five times as fast, show what
the rest of the work costs.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megatron_hbp.corpus.blocks import block_rows, read_blocks
from megatron_hbp.corpus.control_tokens import reveal
from megatron_hbp.corpus.inputs import find_inputs
from megatron_hbp.corpus.options import Options
from megatron_hbp.corpus.prepare import load_recipe, prepare_corpus
from megatron_hbp.corpus.rows import Chat, parse_row
from megatron_hbp.corpus.template import ChatTemplate

_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
_FILES = ("mixed_long_short", "gsm8k_test", "glaive_toolcall_en")
_TOKENIZERS = ("tt2k", "internlm2/tokenizer.model", "sp2k/tokenizer.model")
_INPUT_BYTES = 48 << 20
_BATCH = 1024  # texts
BAR = 0.8


def repeated(source: Path, target: Path, size: int) -> None:
    """Writes the rows of `source` again and again until `target` has about `size` bytes.

    The turn is put before every message: texts that are equal would be encoded once only.
    """
    rows = [json.loads(line) for line in source.read_text("utf-8").split("\n") if line]
    with target.open("w", encoding="utf-8") as file:
        for turn in range(max(1, size // source.stat().st_size)):
            for row in rows:
                messages = [
                    {**message, "content": f"{turn} {message.get('content') or ''}"}
                    for message in row["messages"]
                ]
                file.write(json.dumps({**row, "messages": messages}) + "\n")


def rendered_texts(path: Path, tokenizer: Path) -> list[str]:
    """The text of every row, as the template prints it."""
    recipe, _ = load_recipe(tokenizer, Options())
    variables, control = recipe.tokenizer.variables, recipe.tokenizer.control_tokens
    template = ChatTemplate(recipe.template, variables, control)
    texts = []
    for file in find_inputs([path]):
        for block in read_blocks(file):
            for _, row in block_rows(block):
                chat = parse_row(row)
                assert isinstance(chat, Chat)
                texts.append(reveal(template.render(chat).text))
    return texts


def bare_encoder(tokenizer: Path) -> Callable[[list[str]], list[list[int]]]:
    """The library's own batch call, on all cores."""
    if tokenizer.suffix == ".model":
        import sentencepiece  # noqa: PLC0415

        model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
        return lambda texts: model.encode(texts, num_threads=os.cpu_count())
    import tokenizers  # noqa: PLC0415

    backend = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    backend.no_truncation()
    return lambda texts: [e.ids for e in backend.encode_batch_fast(texts)]


def measure(name: str, tokenizer: Path, folder: Path, size: int, turns: int) -> dict:
    """Seconds of both, and their ratio."""
    source = folder / f"{name}.jsonl"
    repeated(_DATA / "messages" / f"{name}.jsonl", source, size)
    texts = rendered_texts(source, tokenizer)
    encode = bare_encoder(tokenizer)
    ours, bare = [], []
    for turn in range(turns):
        start = time.perf_counter()
        for first in range(0, len(texts), _BATCH):
            encode(texts[first : first + _BATCH])
        bare.append(time.perf_counter() - start)
        start = time.perf_counter()
        prepare_corpus([source], tokenizer, folder / f"corpus-{turn}")
        ours.append(time.perf_counter() - start)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    return {
        "rows": name,
        "tokenizer": str(tokenizer.relative_to(_DATA / "tokenizer")),
        "megabytes": megabytes,
        "row_count": len(texts),
        "bare_seconds": min(bare),
        "our_seconds": min(ours),
        "ratio": min(bare) / min(ours),
    }


def main() -> None:
    """Prints one line per tokenizer and kind of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--bytes", type=int, default=_INPUT_BYTES)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    results = []
    print(
        f"{'tokenizer':<26} {'rows':<20} {'MB':>6} {'bare MB/s':>10} {'ours MB/s':>10} {'ratio':>6}"
    )
    for tokenizer in _TOKENIZERS:
        for name in _FILES:
            with tempfile.TemporaryDirectory() as folder:
                result = measure(
                    name, _DATA / "tokenizer" / tokenizer, Path(folder), given.bytes, given.turns
                )
            results.append(result)
            megabytes = result["megabytes"]
            print(
                f"{result['tokenizer']:<26} {name:<20} {megabytes:>6.1f} "
                f"{megabytes / result['bare_seconds']:>10.2f} "
                f"{megabytes / result['our_seconds']:>10.2f} {result['ratio']:>6.2f}",
                flush=True,
            )
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
