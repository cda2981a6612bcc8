"""Widths, heads, experts and vocabulary of a model, scaled down; its structure stays.

Guarantees (asserted by tests/unit/test_rehearsal_scale.py):
- heads stay divisible by TP x CP, and query heads stay as many times the key/value heads; whether
  key/value heads are fewer than CP ranks stays as it is;
- routing keeps its groups, its experts per chosen group; dense and MoE layers keep their order.
"""

import re
from itertools import groupby

from megatron_hbp.recipe import Value
from megatron_hbp.rehearsal.scale_layout import Places
from megatron_hbp.rehearsal.scaling import Scaling

VOCAB = 250  # token ids of the synthetic corpora

_SMALL = "small enough for a CPU"
_HEAD_DIM = 8


def scale_model(scaling: Scaling, own: Places, few: Places, num_layers: int) -> None:
    """Sets the flags of a model of num_layers layers on `few`."""
    heads = _scale_heads(scaling, own, few)
    hidden = 64
    if "kv-channels" in scaling:
        scaling.set("kv-channels", _HEAD_DIM, _SMALL)
    elif "multi-latent-attention" not in scaling:
        hidden = max(1, 64 // (heads * _HEAD_DIM)) * heads * _HEAD_DIM
    scaling.set("hidden-size", hidden, _SMALL)
    for flag, value in (
        ("ffn-hidden-size", 96),
        ("q-lora-rank", 32),
        ("kv-lora-rank", 16),
        ("qk-head-dim", 16),
        ("qk-pos-emb-head-dim", 8),
        ("v-head-dim", 16),
    ):
        if flag in scaling:
            scaling.set(flag, value, _SMALL)
    if "num-experts" in scaling:
        _scale_experts(scaling, few, num_layers)
    scaling.set("vocab-size", VOCAB, "the synthetic corpus has few tokens")
    scaling.take_away("padded-vocab-size", "follows from --vocab-size")


def _scale_heads(scaling: Scaling, own: Places, few: Places) -> int:
    heads = scaling.number("num-attention-heads")
    cp, new_cp = own.cp_sizes[-1], few.cp_sizes[-1]
    why = "divisible by TP x CP"
    if "group-query-attention" in scaling:
        groups = scaling.number("num-query-groups")
        times = max(1, heads // max(groups, 1))
        fewer_than_cp = max(1, groups // own.tp_size) < cp
        new_groups = few.tp_size * (1 if fewer_than_cp else new_cp)
        scaling.set("num-query-groups", new_groups, "query heads stay as many times it")
        new = new_groups * times
        while new % (few.tp_size * new_cp):
            new += new_groups
            why = "divisible by TP x CP, which changes heads per key/value head"
    else:
        new = max(4, few.tp_size * new_cp)
    scaling.set("num-attention-heads", new, why)
    return new


def _scale_experts(scaling: Scaling, few: Places, num_layers: int) -> None:
    topk = scaling.number("moe-router-topk", 2)
    if "moe-router-num-groups" in scaling:
        group_topk = scaling.number("moe-router-group-topk", 1)
        new_group_topk = min(group_topk, 2)
        each = max(1, topk // max(group_topk, 1))  # experts of a chosen group
        groups = 4
        experts = groups * max(2, min(each, 2) * 2)
        new_topk = new_group_topk * min(each, 2)
        scaling.set("moe-router-num-groups", groups, "groups of experts are kept")
        scaling.set("moe-router-group-topk", new_group_topk, "groups of experts are kept")
    else:
        experts, new_topk = 8, min(topk, 2)
    scaling.set("num-experts", experts, _SMALL)
    scaling.set("moe-router-topk", new_topk, "as many of a group" if topk > 2 else _SMALL)
    ffn, shared = "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size"
    if shared in scaling:
        size = scaling.number(ffn, scaling.number("ffn-hidden-size", 0) or 1)
        times = max(1, round(scaling.number(shared) / size))
        scaling.set(shared, 32 * min(times, 4), "as many shared experts, 4 at most")
    if ffn in scaling:
        scaling.set(ffn, 32, _SMALL)
    pattern = _pattern(scaling.flags)
    if pattern:
        kinds = "".join(kind for kind, _ in groupby(pattern))  # a run of equal layers: one of them
        kinds = (kinds + kinds[-1] * num_layers)[:num_layers]
        scaling.set(
            "moe-layer-freq", f"([{','.join(kinds)}])", "dense and MoE layers in the same order"
        )


def num_dense_layers(flags: dict[str, Value]) -> int:
    """Dense layers in front of the first MoE layer, by --moe-layer-freq."""
    pattern = _pattern(flags)
    return len(pattern) - len(pattern.lstrip("0"))


def _pattern(flags: dict[str, Value]) -> str:
    """The layers of a --moe-layer-freq such as ([0]*1+[1]*26) as digits; empty for a number."""
    text = re.sub(r"[\s()'\"]", "", str(flags.get("moe-layer-freq", "1")))
    if text.isdigit():
        return ""
    digits = ""
    for part in text.split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d+))?", part)
        if match is None:
            raise ValueError(
                f"--moe-layer-freq is {flags['moe-layer-freq']!r}; give a number, or layers as in "
                "([0]*1+[1]*26)"
            )
        digits += match[1].replace(",", "") * min(int(match[2] or 1), 10_000)
    return digits
