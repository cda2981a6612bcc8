"""Model shapes from Megatron arguments: a command line, a shell script, plain flags, or JSON.

Read from a file are `--flag value` and `--flag=value` in text that a shell would understand
(comments, quotes, line ends with a backslash, arrays, `NAME=value` and `$NAME`,
`${NAME:-default}`), a JSON list of such words, or a JSON object {"num-layers": 32, "swiglu": true}.
Unknown flags are passed over; nothing is run. Defaults are Megatron's
(megatron/training/arguments.py, TransformerConfig).

Guarantees (asserted by tests/unit/test_models.py):
- a flag that is missing, has no number, contradicts another one, or asks for what the plugin does
  not train is an error that names it;
- of a flag that a command line gives twice the last one counts, as for Megatron; a file that gives
  it twice with other values is an error.
"""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_hbp.model_shape import MOST_LAYERS, ModelShape

_NUMBERS = (
    "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels "
    "q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim num-experts "
    "moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size vocab-size "
    "padded-vocab-size mtp-num-layers"
).split()
_SWITCHES = (
    "group-query-attention multi-latent-attention swiglu untie-embeddings-and-output-weights "
    "add-qkv-bias"
).split()
_MLA = "q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim".split()
_MOE = (
    "moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-layer-freq"
).split()
_ASSIGNMENT = re.compile(r"(?:export )?([A-Za-z_]\w*)=([^(].*)?", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_PATTERN_PART = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")


def read_model(path: Path) -> ModelShape:
    """The shape that a file of Megatron arguments describes. Raises ValueError, with the file."""
    try:
        return _shape(path.stem, _flags(path.read_text(encoding="utf-8")))
    except RecursionError:
        raise ValueError(f"Megatron arguments {path}: JSON nested too deeply") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"Megatron arguments {path}: {error}") from None


def model_of(name: str, words: Sequence[str], *, vocab_rows: int | None = None) -> ModelShape:
    """The shape that a command line describes.

    words: as given to Megatron. vocab_rows: of the embedding as built, padding included, where that
    is known (None: what the flags say). Raises ValueError, which names the flag.
    """
    words = list(words)
    if vocab_rows is not None:
        words += ["--padded-vocab-size", str(vocab_rows)]
    return _shape(name, dict(_pairs(words)))


def _flags(text: str) -> dict[str, str | None]:
    """Flags without dashes in front, underscores as dashes; None for one without a value."""
    if text.lstrip()[:1] in ("{", "["):
        document = json.loads(text)
        if isinstance(document, dict):
            return _json_flags(document)
        if not all(isinstance(word, str | int | float) for word in document):
            raise ValueError("a JSON list must hold the words of a command line")
        words = [str(word) for word in document]
    else:
        words = _shell_words(text)
    flags: dict[str, str | None] = {}
    for name, value in _pairs(words):
        _put(flags, name, value)
    return flags


def _pairs(words: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each flag of a command line in turn, without dashes in front, and its first value."""
    found = []
    for index, word in enumerate(words):
        if not re.match(r"--[A-Za-z]", word):
            continue
        name, equals, value = word.partition("=")
        if not equals:
            following = words[index + 1] if index + 1 < len(words) else "--"
            value = None if following.startswith("--") or following == ")" else following
        found.append((name.removeprefix("--").replace("_", "-"), value))
    return found


def _json_flags(document: dict[str, Any]) -> dict[str, str | None]:
    flags: dict[str, str | None] = {}
    for key, value in document.items():
        if value is None or value is False:
            continue
        text = None if value is True else str(value)
        _put(flags, key.removeprefix("--").replace("_", "-"), text)
    return flags


def _put(flags: dict[str, str | None], name: str, value: str | None) -> None:
    known = name in _NUMBERS or name in _SWITCHES or name == "moe-layer-freq"
    if not known:
        return
    if flags.get(name, value) != value:
        raise ValueError(f"--{name} is given twice, as {flags[name]} and {value}; keep one")
    flags[name] = value


def _shell_words(text: str) -> list[str]:
    """Words of a shell text, with variables that it sets itself put in."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ValueError(f"a quote is not closed ({error})") from None
    values: dict[str, str] = {}
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match:
            values[match[1]] = match[2] or ""

    def value(match: re.Match) -> str:
        default = match[2]
        unset = match[0] if default is None else default
        return str(values.get(match[1] or match[3], unset))

    found = []
    for word in words:
        # variables may hold flags, or other variables
        for _ in range(3):
            word = _VARIABLE.sub(value, word)  # noqa: PLW2901
        found += word.split() if "--" in word and " " in word else [word]
    return [word.removesuffix(")") if word.startswith("--") else word for word in found]


def _shape(name: str, flags: dict[str, str | None]) -> ModelShape:
    numbers = {flag: _number(flag, flags[flag]) for flag in _NUMBERS if flag in flags}
    for flag in ("num-layers", "hidden-size", "num-attention-heads"):
        if flag not in numbers:
            raise ValueError(f"--{flag} is missing; add it")
    if "vocab-size" not in numbers and "padded-vocab-size" not in numbers:
        raise ValueError(
            "neither --vocab-size nor --padded-vocab-size is given (Megatron asks the tokenizer); "
            "add --vocab-size N"
        )
    if numbers.get("mtp-num-layers"):
        raise ValueError("--mtp-num-layers: multi-token prediction is not supported; leave it out")
    mla, moe = "multi-latent-attention" in flags, "num-experts" in numbers
    _check_together(flags, mla=mla, moe=moe)
    hidden, heads = numbers["hidden-size"], numbers["num-attention-heads"]
    swiglu = "swiglu" in flags
    ffn = numbers.get("ffn-hidden-size")
    if ffn is None:
        ffn = int(4 * hidden * 2 / 3) // 64 * 64 if swiglu else 4 * hidden
    if "kv-channels" not in numbers and hidden % heads:
        raise ValueError(
            f"--num-attention-heads {heads} does not divide --hidden-size {hidden}; add "
            "--kv-channels"
        )
    latent: dict[str, Any] = {}
    if mla:
        latent = {
            "q_lora_rank": numbers.get("q-lora-rank"),
            "kv_lora_rank": numbers.get("kv-lora-rank", 32),
            "qk_nope_head_dim": numbers.get("qk-head-dim", 128),
            "qk_rope_head_dim": numbers.get("qk-pos-emb-head-dim", 64),
            "v_head_dim": numbers.get("v-head-dim", 128),
        }
    experts: dict[str, Any] = {}
    if moe:
        experts = {
            "num_experts": numbers["num-experts"],
            "moe_topk": numbers.get("moe-router-topk", 2),
            "moe_ffn_hidden_size": numbers.get("moe-ffn-hidden-size", ffn),
            "moe_shared_ffn_hidden_size": numbers.get("moe-shared-expert-intermediate-size", 0),
            "first_dense_layers": _dense_first(flags.get("moe-layer-freq"), numbers["num-layers"]),
        }
    return ModelShape(
        name=name,
        num_layers=numbers["num-layers"],
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=numbers.get("num-query-groups", heads),
        head_dim=numbers.get("kv-channels", hidden // heads),
        vocab_size=numbers.get("padded-vocab-size", numbers.get("vocab-size", 0)),
        tied_embeddings="untie-embeddings-and-output-weights" not in flags,
        gated_mlp=swiglu,
        qkv_bias="add-qkv-bias" in flags,
        **latent,
        **experts,
    )


def _check_together(flags: dict[str, str | None], *, mla: bool, moe: bool) -> None:
    grouped = "group-query-attention" in flags
    if grouped and mla:
        raise ValueError(
            "--group-query-attention and --multi-latent-attention exclude each other; keep one"
        )
    if grouped and "num-query-groups" not in flags:
        raise ValueError("--group-query-attention needs --num-query-groups; add it")
    if not grouped and "num-query-groups" in flags:
        raise ValueError(
            "--num-query-groups is given without --group-query-attention, so Megatron ignores it; "
            "add that flag, or leave this one out"
        )
    for switch, on, needing in (("multi-latent-attention", mla, _MLA), ("num-experts", moe, _MOE)):
        alone = [flag for flag in needing if flag in flags]
        if alone and not on:
            raise ValueError(
                f"--{alone[0]} is given without --{switch}; add that flag, or leave this one out"
            )


def _number(flag: str, text: str | None) -> int:
    if text is not None and "$" in text:
        raise ValueError(f"--{flag} is {text}, which the file does not set; write the number")
    if text is None or not re.fullmatch(r"\d{1,18}", text):
        raise ValueError(f"--{flag} is {text!r}; give a whole number")
    return int(text)


def _dense_first(text: str | None, num_layers: int) -> int:
    """Dense layers before the first MoE layer of a --moe-layer-freq such as ([0]*1+[1]*26)."""
    text = "1" if text is None else text
    compact = re.sub(r"[\s()'\"]", "", text)
    if compact == "1":
        return 0
    rule = "give 1, or dense layers first as in ([0]*1+[1]*26)"
    pattern: list[str] = []
    for part in compact.split("+"):
        match = _PATTERN_PART.fullmatch(part)
        if match is None:
            raise ValueError(f"--moe-layer-freq is {text!r}; {rule}")
        pattern += match[1].split(",") * min(int(match[2] or 1), MOST_LAYERS + 1)
    layers = "".join(pattern)
    if len(layers) != num_layers:
        raise ValueError(
            f"--moe-layer-freq {text} describes {len(layers)} layers, --num-layers is "
            f"{num_layers}; make them agree"
        )
    if not re.fullmatch("0*1+", layers):
        raise ValueError(f"--moe-layer-freq is {text!r}, which mixes dense and MoE layers; {rule}")
    return layers.index("1")
