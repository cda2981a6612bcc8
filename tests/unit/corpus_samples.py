"""Tokenizers, chats and short cuts for the tests of the corpus."""

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from megatron_hbp.corpus import Corpus
from megatron_hbp.corpus.prepare import prepare_corpus
from megatron_hbp.corpus.tokenizer import load_tokenizer

CHATML = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def char_tokenizer(folder: Path, *, template=CHATML, adds_start=False, **config) -> Path:
    """A Hugging Face folder of one token per byte; ids 0-255 are bytes, control tokens follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    if adds_start:
        start = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[start]
        )
    return save_tokenizer(
        tokenizer, folder, template, **{"bos_token": "<s>", "eos_token": "</s>"} | config
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path, template: str | None, **config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {name: value for name, value in config.items() if value is not None}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chat(roles: str, contents=None, **keys) -> dict:
    """A row: chat("uat") has a user, an assistant and a tool message."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "x": "critic"}
    contents = contents or [f"{role}{i}" for i, role in enumerate(roles)]
    messages = [
        {"role": names[role], "content": content}
        for role, content in zip(roles, contents, strict=True)
    ]
    return {"messages": messages, **keys}


def write_rows(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(tmp_path: Path, rows, tokenizer: Path, name="corpus", **options) -> Corpus:
    source = rows if isinstance(rows, Path) else write_rows(tmp_path / f"{name}.jsonl", rows)
    return prepare_corpus([source], tokenizer, tmp_path / name, **options)


def rejects(corpus: Corpus) -> list[tuple[int, str]]:
    """(line, reason) of each rejected row."""
    lines = (corpus.path / "rejects.jsonl").read_text().splitlines()
    return [(entry["line"], entry["reason"]) for entry in map(json.loads, lines)]


@functools.cache
def decoder(tokenizer_path: Path):
    """ids -> text with control tokens, for any tokenizer the corpus takes."""
    loaded = load_tokenizer(tokenizer_path)
    if tokenizer_path.suffix == ".model":
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_path))
        control = {token.id: text for text, token in loaded.control_tokens.by_text.items()}
        return lambda ids: "".join(
            control.get(i) or model.id_to_piece(i).replace("\u2581", " ") for i in map(int, ids)
        )
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(tokenizer_path), local_files_only=True)
    return lambda ids: tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def texts(corpus: Corpus, tokenizer: Path, index: int = 0) -> tuple[str, str]:
    """(whole text, trained text) of a sequence."""
    decode = decoder(tokenizer)
    tokens, mask = corpus.tokens(index), corpus.mask(index)
    return decode(tokens), decode(tokens[mask == 1])
