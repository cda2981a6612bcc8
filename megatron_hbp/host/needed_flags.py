"""Flags that need each other or exclude each other: routing, optimizer, schedule, precision, logs.

As layout_checks.py, whose guarantees are these, too. Rules: megatron-core 0.19, validate_args,
TransformerConfig, MLATransformerConfig and OptimizerConfig in their __post_init__,
OptimizerParamScheduler, group_limited_topk, _set_wandb_writer, the steps of training.py that divide
by an interval; TE's checks of FP8 and FP4 recipes.
"""

import os
from typing import Any

import torch
from megatron.core.utils import get_te_version, is_te_min_version

from megatron_hbp.host.flag_words import divisors, flag_of, require

# attribute, the attribute that it needs
_NEEDS = (
    ("overlap_param_gather", "use_distributed_optimizer"),
    ("overlap_param_gather", "overlap_grad_reduce"),
    ("overlap_param_gather_with_optimizer_step", "overlap_param_gather"),
    ("use_precision_aware_optimizer", "use_distributed_optimizer"),
    ("optimizer_cpu_offload", "use_precision_aware_optimizer"),
    ("tp_comm_overlap", "sequence_parallel"),
    ("save", "save_interval"),
    ("load_main_params_from_ckpt", "no_load_optim"),
    ("q_lora_rank", "multi_latent_attention"),
    ("moe_ffn_hidden_size", "num_experts"),
    ("moe_shared_expert_intermediate_size", "num_experts"),
    ("moe_router_num_groups", "num_experts"),
    ("moe_router_group_topk", "moe_router_num_groups"),
)
_EXCLUDE = (
    ("fp16", "bf16"),
    ("swiglu", "squared_relu"),
    ("lr_warmup_fraction", "lr_warmup_iters"),
)
# Flags of runs that count samples; a plan counts steps, so the host would pass over them.
_SAMPLES = (("lr_decay_samples", "lr_decay_iters"), ("lr_warmup_samples", "lr_warmup_iters"))
_LEAST = (
    ("seed", 1),
    ("log_interval", 1),
    ("eval_interval", 1),
    ("num_workers", 0),
    ("lr_decay_iters", 1),
    ("distributed_timeout_minutes", 1),
    ("make_vocab_size_divisible_by", 1),
)
_ROUTER_FUSION_TE = "2.7.0.dev0"
_FP4_DEVICE = (10, 0)
# Compute capability from which, and below which, TE runs the recipe.
_FP8_DEVICES = {
    "delayed": ((8, 9), None),
    "tensorwise": ((8, 9), None),
    "blockwise": ((9, 0), None),
    "mxfp8": ((10, 0), (12, 0)),
}
# The release of TE from which the host takes the recipe, asked for in its first forward.
_FP8_TE = {"delayed": "1.0", "tensorwise": "2.2", "blockwise": "2.3", "mxfp8": "2.1"}


def check_flags(args: Any, *, on_cpu: bool) -> None:
    """Everything here, of arguments that are not validated yet. Raises ValueError.

    on_cpu: whether the CPU runtime stands in for the GPU.
    """
    for name, needed in _NEEDS:
        require(
            not getattr(args, name) or getattr(args, needed),
            f"{flag_of(name)} needs {flag_of(needed)}; add it, or leave {flag_of(name)} out",
        )
    for one, other in _EXCLUDE:
        require(
            not (getattr(args, one) and getattr(args, other)),
            f"{flag_of(one)} and {flag_of(other)} exclude each other; leave one out",
        )
    for name, least in _LEAST:
        value = getattr(args, name)
        require(
            value is None or value >= least,
            f"{flag_of(name)} is {value}; it must be {least} or more",
        )
    _check_tokenizer(args)
    _check_routing(args)
    _check_schedule(args)
    _check_saving(args)
    _check_fusions(args)
    if args.fp8:
        _check_fp8(args, on_cpu=on_cpu)
    if args.fp4:
        _check_fp4(args, on_cpu=on_cpu)
    if not on_cpu:
        _check_connections(args)


def _check_tokenizer(args: Any) -> None:
    """The host builds one, although the corpus holds tokens."""
    require(
        args.tokenizer_type is not None,
        "--tokenizer-type is missing; use NullTokenizer with --vocab-size: the corpus holds tokens",
    )
    require(
        args.tokenizer_type != "NullTokenizer" or (args.vocab_size or 0) >= 1,
        f"--vocab-size is {args.vocab_size or 'missing'}; --tokenizer-type NullTokenizer needs it",
    )


def _check_routing(args: Any) -> None:
    experts, topk, groups = args.num_experts, args.moe_router_topk, args.moe_router_num_groups
    if not experts:
        return
    require(
        1 <= topk <= experts,
        f"--moe-router-topk is {topk} of --num-experts {experts}; use 1 to {experts}",
    )
    require(
        topk > 1 or args.moe_router_score_function != "softmax" or args.moe_router_pre_softmax,
        "--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one expert has no "
        "gradient; add it, or use 2 or more",
    )
    chosen = args.moe_router_group_topk
    if not chosen:
        return
    require(
        experts % groups == 0,
        f"--num-experts {experts} is no multiple of --moe-router-num-groups {groups}; use one of "
        f"{divisors(experts)} groups",
    )
    require(
        1 <= chosen <= groups,
        f"--moe-router-group-topk is {chosen} of --moe-router-num-groups {groups}; use 1 to "
        f"{groups}",
    )
    size = experts // groups
    require(
        topk >= chosen and topk // chosen <= size and topk <= chosen * size,
        f"--moe-router-topk {topk} from --moe-router-group-topk {chosen} groups of {size} experts: "
        f"each group must give at least 1 and at most {size}; use {chosen} to {chosen * size}",
    )


def _check_schedule(args: Any) -> None:
    require(args.lr is not None, "--lr is missing; give the largest learning rate")
    for name, value in (("min_lr", args.min_lr), ("lr_warmup_init", args.lr_warmup_init)):
        require(
            0 <= value <= args.lr,
            f"{flag_of(name)} is {value}, --lr is {args.lr}; it must be from 0 to that",
        )
    fraction = args.lr_warmup_fraction
    require(
        fraction is None or 0 <= fraction < 1,
        f"--lr-warmup-fraction is {fraction}; it must be from 0 to below 1",
    )
    for name, instead in _SAMPLES:
        require(
            not getattr(args, name),
            f"{flag_of(name)} is not supported with HBP: a plan counts steps; use "
            f"{flag_of(instead)}",
        )
    require(
        args.lr_decay_style != "WSD" or args.lr_wsd_decay_iters is not None,
        "--lr-decay-style WSD needs --lr-wsd-decay-iters; add it",
    )
    constant = args.weight_decay_incr_style == "constant"
    for name in ("start_weight_decay", "end_weight_decay"):
        given = getattr(args, name) is not None
        require(
            given != constant,
            f"{flag_of(name)} {'goes not' if constant else 'must go'} with "
            f"--weight-decay-incr-style {args.weight_decay_incr_style}; "
            + ("leave it out, or use linear or cosine" if constant else "add it"),
        )


def _check_saving(args: Any) -> None:
    interval, retain = args.save_interval, args.save_retain_interval
    require(
        interval is None or interval >= 1, f"--save-interval is {interval}; it must be 1 or more"
    )
    require(
        retain is None or (interval and retain >= 1 and retain % interval == 0),
        f"--save-retain-interval {retain} is no multiple of --save-interval {interval}; use one",
    )
    every = args.log_memory_interval
    require(
        every is None or every % args.log_interval == 0,
        f"--log-memory-interval {every} is no multiple of --log-interval {args.log_interval}; use "
        "one",
    )

    require(
        not args.wandb_project or args.save or args.wandb_save_dir,
        "--wandb-project needs --wandb-save-dir, or --save; add one: the last rank writes there",
    )


def _check_fusions(args: Any) -> None:
    require(
        not args.moe_router_fusion or is_te_min_version(_ROUTER_FUSION_TE),
        f"--moe-router-fusion needs Transformer Engine 2.7 or later, there is {get_te_version()}; "
        "leave it out",
    )
    require(
        not (args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te"),
        "--cross-entropy-fusion-impl te is refused by Megatron-LM as unstable; use native",
    )
    require(
        not (args.multi_latent_attention and args.apply_rope_fusion and args.rope_type == "rope"),
        "--rope-type rope with --multi-latent-attention needs --no-rope-fusion; add it, or use "
        "--rope-type yarn",
    )
    require(
        args.multi_latent_attention or args.rope_type in (None, "rope"),
        f"--rope-type {args.rope_type} needs --multi-latent-attention; use rope, with "
        "--use-rope-scaling where the model has it",
    )
    require(
        getattr(args.attention_backend, "name", "") != "local",
        "--attention-backend local needs --spec local, and HBP brings the layer spec; use "
        "--transformer-impl local, or another backend",
    )
    full = args.recompute_granularity == "full"
    require(
        not full or None not in (args.recompute_method, args.recompute_num_layers),
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers; add "
        "them, or name recompute in --hbp-level PACK_LEN:CP:RECOMPUTE",
    )
    require(
        args.recompute_granularity != "selective" or args.recompute_method is None,
        "--recompute-method does not go with --recompute-granularity selective; leave it out",
    )
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    require(
        not (args.num_experts and args.add_bias_linear and expert_tp > 1),
        f"--expert-tensor-parallel-size {expert_tp} needs --disable-bias-linear: experts with "
        "biases are not split; add that flag, or use 1",
    )


def _check_fp4(args: Any, *, on_cpu: bool) -> None:
    found = _FP4_DEVICE if on_cpu else torch.cuda.get_device_capability()
    require(
        found >= _FP4_DEVICE,
        f"--fp4-format needs GPUs of compute capability {_FP4_DEVICE[0]}.{_FP4_DEVICE[1]} or "
        f"later, these have {found[0]}.{found[1]}; use --fp8-format, or --bf16 alone",
    )


def _check_fp8(args: Any, *, on_cpu: bool) -> None:
    require(not args.fp4, "--fp4-format and --fp8-format exclude each other; leave one out")
    require(
        not args.fp8_param_gather or args.use_distributed_optimizer,
        "--fp8-param-gather needs --use-distributed-optimizer; add it, or leave the flag out",
    )
    if on_cpu or args.fp8_recipe not in _FP8_DEVICES:
        return
    release = _FP8_TE[args.fp8_recipe]
    require(
        is_te_min_version(f"{release}.0.dev0"),
        f"--fp8-recipe {args.fp8_recipe} needs Transformer Engine {release} or later, there is "
        f"{get_te_version()}; use delayed, or a later release",
    )
    found = torch.cuda.get_device_capability()
    least, below = _FP8_DEVICES[args.fp8_recipe]
    fitting = [
        recipe
        for recipe, (low, high) in _FP8_DEVICES.items()
        if found >= low and (high is None or found < high)
    ]
    require(
        args.fp8_recipe in fitting,
        f"--fp8-recipe {args.fp8_recipe} needs GPUs of compute capability {least[0]}.{least[1]} or "
        + (f"later, below {below[0]}.{below[1]}" if below else "later")
        + f", these have {found[0]}.{found[1]}; use "
        + (" or ".join(fitting) if fitting else "--bf16 without --fp8-format"),
    )


def _check_connections(args: Any) -> None:
    """Megatron-LM relies on the order of one queue where TP overlaps its communication."""
    tp = args.tensor_model_parallel_size
    if tp == 1 or torch.cuda.get_device_capability()[0] >= 10:
        return
    found = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    require(
        found == "1",
        f"--tensor-model-parallel-size {tp} needs CUDA_DEVICE_MAX_CONNECTIONS=1 in the "
        f"environment on these GPUs, it is {found or 'not set'}; export it before torchrun",
    )
