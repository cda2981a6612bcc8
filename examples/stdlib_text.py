"""Rows and a tokenizer for trying the plugin out, made from what every machine has.

The text is Python's own standard library: each documented function is one row (asked for by
signature and docstring, answered by its source), and so is each documented module. So lengths are
truly mixed, from a few dozen tokens to tens of thousands. Files are parsed, never imported.

Guarantees:
- the same Python gives the same rows in the same order, byte for byte;
- nothing is fetched.

    python -m examples.stdlib_text --output DIR     # DIR/rows.jsonl and DIR/tokenizer/
"""

import argparse
import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 1234
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages"}
_SKIPPED_FOLDERS |= {"dist-packages", "ensurepip", "encodings", "__pycache__", "turtledemo"}
_CONTROL_TOKENS = ("<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# characters of rows that the tokenizer is trained on; more of them change little but the time
_TRAINING_CHARACTERS = 4_000_000


def write_rows(path: Path, max_rows: int | None = None) -> int:
    """Writes at most max_rows rows (default all, about 6,000) in a shuffled, fixed order.

    Returns their number.
    """
    rows = list(_rows(Path(sysconfig.get_paths()["stdlib"])))
    random.Random(SEED).shuffle(rows)
    rows = rows[:max_rows]
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for question, answer in rows:
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return len(rows)


def train_tokenizer(rows_path: Path, folder: Path, vocab_size: int = 4096) -> Path:
    """Trains a byte-level BPE on the rows and writes it as a Hugging Face folder. Returns it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(rows_path), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return folder


def _rows(root: Path) -> Iterator[tuple[str, str]]:
    """(question, answer) pairs in the order of the files and their lines."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _SKIPPED_FOLDERS.isdisjoint(relative.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        lines = source.split("\n")  # not splitlines: form feeds end no line for `ast`
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring:
                    signature = f"def {node.name}({ast.unparse(node.args)})"
                    answer = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                    yield f"Write `{signature}` of {module}.\n\n{docstring}", answer
        docstring = ast.get_docstring(tree)
        if docstring:
            yield f"Write the module {module}: {docstring}", source


def _training_text(rows_path: Path) -> Iterator[str]:
    """Contents of the rows' messages, and the bare line of a row of another shape."""
    left = _TRAINING_CHARACTERS
    with rows_path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                texts = [str(message["content"]) for message in json.loads(line)["messages"]]
            except (ValueError, LookupError, TypeError):
                texts = [line]
            yield from texts
            left -= sum(map(len, texts))
            if left < 0:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--max-rows", type=int, metavar="N", help="default: all rows")
    parser.add_argument("--vocab-size", type=int, default=4096, metavar="N")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows_path = arguments.output / "rows.jsonl"
    count = write_rows(rows_path, arguments.max_rows)
    folder = train_tokenizer(rows_path, arguments.output / "tokenizer", arguments.vocab_size)
    print(f"{count} rows in {rows_path}, tokenizer in {folder}")


if __name__ == "__main__":
    main()
