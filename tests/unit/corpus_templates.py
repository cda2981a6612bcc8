"""Chat templates in the manner of well-known models, and the texts that are trained with them.

The templates print the control tokens of the tokenizer of one token per byte.
"""

import functools
import json
from pathlib import Path

import numpy as np

from megatron_hbp.corpus import Corpus
from tests.unit.corpus_samples import CHATML, char_tokenizer, decoder, prepare

# a header of control tokens, which none of an answer's text may be taken for; answers are trimmed
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>\n\n"
    "{{ m.content | trim }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}"
    "{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}"
)
# no generation prompt: the question's own end is what the answer follows
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ raise_exception('only user and assistant take turns') }}{% endif %}{% endfor %}"
)
# roles in plain words; the generation prompt ends before the space of the header
DEEPSEEK2 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}Assistant: {{ m.content }}</s>"
    "{% elif m.role == 'user' %}User: {{ m.content }}\n\n{% else %}{{ m.content }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
# reasoning is printed after the last question only, and there for the last answer at least
REASONING = (
    "{% set last = namespace(question=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > last.question "
    "and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{% if m.role == 'tool' %}<answer>{{ m.content }}</answer>{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\\n' }}<call>{{ call.function | tojson }}</call>"
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# earlier answers lose their reasoning, which is part of their content
THINKS_ONCE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|im_end|>"
    "{{ m.content if loop.last else m.content.split('</think>') | last }}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_end|>{% endif %}"
)
# a second token follows the last answer's own end
TWO_ENDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}</s>{% endif %}"
)
TWO_ENDS_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% if loop.last and m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# never prints a generation prompt, though answers have a header
NO_PROMPT = CHATML.partition("{% if add_generation_prompt %}")[0]


def with_blocks(template: str) -> str:
    """CHATML, LLAMA3, MISTRAL or DEEPSEEK2 with generation blocks around answers and their end."""
    start = "{% if m.role == 'assistant' %}{% generation %}"
    if template == CHATML:
        begin = template.index("{{ m.content }}")
        end = template.index("<|im_end|>\n{% endfor %}") + len("<|im_end|>")
    elif template == LLAMA3:
        begin = template.index("{{ m.content | trim }}")
        end = template.index("</s>{% endfor %}") + len("</s>")
    else:
        mark = " {{ m.content }}</s>"
        return template.replace(mark, "{% generation %}" + mark + "{% endgeneration %}")
    body, rest = template[begin:end], template[end:]
    if rest.startswith("\n"):  # which would vanish after a block
        rest = "{{ '\\n' }}" + rest[1:]
    return (
        f"{template[:begin]}{start}{body}{{% endgeneration %}}{{% else %}}{body}{{% endif %}}{rest}"
    )


def trained_texts(corpus: Corpus, tokenizer: Path, index: int = 0) -> list[str]:
    """The decoded runs of tokens with mask 1."""
    tokens, mask = corpus.tokens(index), corpus.mask(index)
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    decode = decoder(tokenizer)
    return [decode(tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def trained(tmp_path: Path, row: dict, template: str = CHATML) -> list[str]:
    """Trained texts of one row with the tokenizer of one token per byte."""
    name = f"c{len(list(tmp_path.iterdir()))}"
    tokenizer = char_tokenizer(tmp_path / f"{name}-tokenizer", template=template)
    return trained_texts(prepare(tmp_path, [row], tokenizer, name), tokenizer)


@functools.cache
def raw_rows(path: Path) -> list[dict]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
