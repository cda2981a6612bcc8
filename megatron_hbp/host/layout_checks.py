"""Checks of the model against its parallel layout: the host's rules in our words.

The host answers most of these with a bare assertion, some with an error of a rank after the groups
are made. Here each is a ValueError with the flag, its value, the rule and a way out, before the
host validates anything. Rules: megatron-core 0.19, validate_args, TransformerConfig.__post_init__,
initialize_model_parallel, the linear layers, MoELayer.forward.

Guarantees (asserted by tests/host/test_layout_checks.py and test_broken_variants.py):
- what is refused here the host refuses, too, cannot train, or would pass over in silence;
- arguments are read, never changed.
"""

from typing import Any

from megatron_hbp.host.flag_words import divisors, flag_of, require
from megatron_hbp.host.pipeline_checks import check_microbatches, check_pipeline

_PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_REQUIRED = (
    ("num_layers", "layers of the whole model"),
    ("hidden_size", "the model's width"),
    ("num_attention_heads", "query heads of a layer"),
    ("seq_length", "the token budget S of a rank"),
    ("max_position_embeddings", "at least the PACK_LEN of the longest level"),
)
_TP = "--tensor-model-parallel-size"
_EP, _EXPERT_TP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"


def check_sizes(args: Any) -> None:
    """Parallel sizes and the numbers that a model cannot do without."""
    for name in _PARALLEL_SIZES:
        size = getattr(args, name)
        require(
            size is None or size >= 1,
            f"{flag_of(name)} is {size}; it must be a whole number of 1 or more",
        )
    for name, meaning in _REQUIRED:
        value = getattr(args, name)
        require(value is not None, f"{flag_of(name)} is missing; give it: {meaning}")
        require(value >= 1, f"{flag_of(name)} is {value}; it must be a whole number of 1 or more")


def check_layout(args: Any, *, has_validation: bool) -> None:
    """Everything of the model and its layout, after check_sizes(). args: not validated yet, plus
    `world_size`, a multiple of TP x PP.

    has_validation: whether a validation corpus is evaluated.
    """
    _check_widths(args)
    _check_experts(args)
    check_pipeline(args)
    check_microbatches(args, has_validation=has_validation)


def _check_widths(args: Any) -> None:
    """Heads, key/value heads and hidden sizes over tensor parallelism."""
    tp, heads, hidden = args.tensor_model_parallel_size, args.num_attention_heads, args.hidden_size
    require(
        heads % tp == 0,
        f"--num-attention-heads {heads} is no multiple of {_TP} {tp}; use a TP size of "
        f"{divisors(heads)}",
    )
    require(
        args.kv_channels is not None or hidden % heads == 0,
        f"--hidden-size {hidden} is no multiple of --num-attention-heads {heads}; add "
        "--kv-channels, the width of a head",
    )
    if args.multi_latent_attention:
        require(
            not args.group_query_attention,
            "--group-query-attention and --multi-latent-attention exclude each other; leave one "
            "out",
        )
    elif args.group_query_attention:
        groups = args.num_query_groups
        require(
            groups >= 1 and heads % groups == 0,
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; use one "
            f"of {divisors(heads)}",
        )
        require(
            groups % tp == 0 or tp % groups == 0,
            f"--num-query-groups {groups} and {_TP} {tp}: neither is a multiple of the other; use "
            "another TP size",
        )
    ffn = args.ffn_hidden_size
    if ffn is None:
        ffn = int(4 * hidden * 2 / 3) // 64 * 64 if args.swiglu else 4 * hidden
    require(
        not _has_dense_layers(args) or ffn % tp == 0,
        f"--ffn-hidden-size {ffn} is no multiple of {_TP} {tp}; use a TP size that divides it",
    )
    rows = args.padded_vocab_size
    require(
        rows is None or rows % tp == 0,
        f"--padded-vocab-size {rows} is no multiple of {_TP} {tp}; use "
        f"{-(-(rows or 0) // tp) * tp}, or leave it out",
    )


def _check_experts(args: Any) -> None:
    """Experts over expert parallelism and the GPUs of a stage; routing is in needed_flags.py."""
    tp, ep, experts = (
        args.tensor_model_parallel_size,
        args.expert_model_parallel_size,
        args.num_experts,
    )
    expert_tp = args.expert_tensor_parallel_size or tp
    gpus = args.world_size // args.pipeline_model_parallel_size
    require(
        experts or ep == 1,
        f"{_EP} is {ep} without --num-experts; use 1, or name the experts",
    )
    require(
        gpus % (ep * expert_tp) == 0,
        f"{_EP} {ep} x {_EXPERT_TP} {expert_tp} does not divide the {gpus} GPUs of a stage (world "
        f"size {args.world_size} / PP {args.pipeline_model_parallel_size}); use sizes whose "
        f"product is one of {divisors(gpus)}"
        + ("" if args.expert_tensor_parallel_size else f" ({_EXPERT_TP} is TP when left out)"),
    )
    if not experts:
        return
    require(
        experts % ep == 0,
        f"--num-experts {experts} is no multiple of {_EP} {ep}; use an EP size of "
        f"{divisors(experts)}",
    )
    require(
        tp == 1 or args.sequence_parallel,
        f"{_TP} {tp} with --num-experts needs --sequence-parallel; add it, or use TP 1",
    )
    for name, size_flag, size in (
        ("moe_ffn_hidden_size", _EXPERT_TP, expert_tp),
        ("moe_shared_expert_intermediate_size", _TP, tp),
    ):
        width = getattr(args, name)
        require(
            width is None or (width >= 1 and width % size == 0),
            f"{flag_of(name)} {width} is no multiple of {size_flag} {size}; use a size that "
            "divides it",
        )
    pattern = args.moe_layer_freq
    require(
        not isinstance(pattern, list) or len(pattern) == args.num_layers,
        f"--moe-layer-freq describes {len(pattern) if isinstance(pattern, list) else 0} layers, "
        f"--num-layers is {args.num_layers}; make them agree, as in "
        f"([0]*1+[1]*{args.num_layers - 1})",
    )


def _has_dense_layers(args: Any) -> bool:
    pattern = args.moe_layer_freq
    return not args.num_experts or (0 in pattern if isinstance(pattern, list) else pattern > 1)
