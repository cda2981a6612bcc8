"""Tokens and masks against Hugging Face's, for templates with generation blocks and without."""

import json

import numpy as np
import pytest

from megatron_hbp.corpus.tokenizer import load_tokenizer
from tests.unit.corpus_samples import CHATML, char_tokenizer, chat, prepare
from tests.unit.corpus_templates import (
    DEEPSEEK2,
    LLAMA3,
    MISTRAL,
    raw_rows,
    trained_texts,
    with_blocks,
)

END = "<|im_end|>"


class HuggingFace:
    """Tokens and masks of rows by the library that the templates are written for."""

    def __init__(self, folder, template=None):
        from transformers import PreTrainedTokenizerFast

        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        if template is not None:
            self.tokenizer.chat_template = template

    def __call__(self, row):
        tools = row.get("tools")
        found = self.tokenizer.apply_chat_template(
            [{**message, "content": message["content"] or ""} for message in row["messages"]],
            tools=(json.loads(tools) if isinstance(tools, str) else tools) or None,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return found["input_ids"], found["assistant_masks"]


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA3, MISTRAL, DEEPSEEK2], ids=["chatml", "llama3", "mistral", "ds2"]
)
def test_masks_equal_hugging_face(tmp_path, shared_data, template):
    folder = char_tokenizer(tmp_path / "t", template=with_blocks(template))
    theirs = HuggingFace(folder)
    rows = [
        *raw_rows(shared_data / "messages" / "fastchat_dummy.jsonl")[::50],
        *raw_rows(shared_data / "messages" / "gsm8k_test.jsonl")[::200],
    ]
    if template in (CHATML, LLAMA3):
        rows += raw_rows(shared_data / "messages" / "glaive_toolcall_zh.jsonl")[:20]
    plain = char_tokenizer(tmp_path / "plain", template=template)
    for tokenizer, name in ((folder, "blocks"), (plain, "derived")):
        corpus = prepare(tmp_path, rows, tokenizer, name)
        for i, row in enumerate(rows):
            assert (corpus.tokens(i).tolist(), corpus.mask(i).tolist()) == theirs(row)


def test_the_end_token_is_trained_though_it_stands_after_the_block(tmp_path):
    """Hugging Face's mask has what is inside the block; the end token just after it is ours."""
    source = with_blocks(CHATML).replace(
        "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
    )
    assert source != with_blocks(CHATML)
    folder = char_tokenizer(tmp_path / "t", template=source)
    row = chat("uaua")
    corpus = prepare(tmp_path, [row], folder)
    tokens, mask = HuggingFace(folder)(row)
    assert corpus.tokens(0).tolist() == tokens
    extra = np.flatnonzero(corpus.mask(0) != mask)
    end_id = load_tokenizer(folder).control_tokens.by_text[END].id
    assert corpus.tokens(0)[extra].tolist() == [end_id, end_id]
    assert corpus.mask(0)[extra].all()
    assert trained_texts(corpus, folder) == ["a1<|im_end|>", "a3<|im_end|>"]


@pytest.mark.parametrize("blocks", [False, True], ids=["derived", "blocks"])
def test_masks_of_a_merging_tokenizer_equal_hugging_face(tmp_path, shared_data, blocks):
    source = shared_data / "tokenizer" / "tt2k"
    theirs = HuggingFace(source, with_blocks(CHATML))
    template = tmp_path / "template.jinja"
    template.write_text(with_blocks(CHATML) if blocks else CHATML)
    rows = [
        *raw_rows(shared_data / "messages" / "glaive_toolcall_en.jsonl")[:25],
        *raw_rows(shared_data / "messages" / "mixed_long_short.jsonl")[:25],
    ]
    corpus = prepare(tmp_path, rows, source, chat_template=template)
    for i, row in enumerate(rows):
        assert (corpus.tokens(i).tolist(), corpus.mask(i).tolist()) == theirs(row)
