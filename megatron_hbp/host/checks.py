"""Every check of the host's arguments against HBP, before anything is built.

Each failure is a ValueError with the flag, its value, the rule and a way out. Anything that could
make ranks issue different collectives is refused here, not found at step 1. The checks run twice:
on the command line as parsed, so that they speak before the host's bare assertions do, and on the
arguments as the host validated them (a checkpoint may bring others).
"""

from typing import Any

import torch
from torch.torch_version import TorchVersion

from megatron_hbp.alignment import Alignment, alignment
from megatron_hbp.config import HbpConfig
from megatron_hbp.host.attention import check_heads
from megatron_hbp.host.layout_checks import check_layout, check_sizes
from megatron_hbp.host.needed_flags import check_flags
from megatron_hbp.host.refused import REFUSED
from megatron_hbp.level import Level
from megatron_hbp.plan import Plan

_VARLEN_TORCH = "2.12"
_BALANCING_OK = ("aux_loss", "none")


def check_command_line(args: Any, config: HbpConfig) -> None:
    """All checks that the command line allows, on arguments that the host has not validated yet.

    args: parsed, plus `world_size`. What the user left out is None here; the host gives its
    default.
    """
    check_sizes(args)
    check_arguments(args, config)
    check_layout(args, has_validation=config.valid_corpus is not None)
    check_flags(args, on_cpu=config.device == "cpu")
    levels = config.level if config.plan is None else Plan.load(config.plan, verify=False).levels
    check_levels_fit(args, levels)


def check_arguments(args: Any, config: HbpConfig) -> None:
    """Checks that need no plan."""
    _require(
        args.micro_batch_size == 1,
        f"--micro-batch-size is {args.micro_batch_size}; with HBP it must be 1: a micro-batch is "
        "one pack per rank; raise --seq-length and the levels' PACK_LEN instead",
    )
    _require(
        args.eval_micro_batch_size in (None, 1),
        f"--eval-micro-batch-size is {args.eval_micro_batch_size}; with HBP it must be 1",
    )
    _require(
        args.context_parallel_size == 1,
        f"--context-parallel-size is {args.context_parallel_size}; with HBP it must be 1: the CP "
        "size of each pack comes from --hbp-level PACK_LEN:CP",
    )
    _require(
        args.dataloader_type == "external",
        f"--dataloader-type is {args.dataloader_type or 'missing'}; HBP needs --dataloader-type "
        "external",
    )
    _require(
        args.calculate_per_token_loss,
        "--calculate-per-token-loss is missing; HBP needs it: losses are summed over tokens and "
        "divided once per step (choose the average with --hbp-loss-normalizer)",
    )
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    _require(
        args.world_size % model_size == 0,
        f"the world size {args.world_size} is not a multiple of TP x PP = {model_size}; use "
        f"{-(-args.world_size // model_size) * model_size} GPUs, or other "
        "--tensor-model-parallel-size and --pipeline-model-parallel-size",
    )
    num_ranks = args.world_size // model_size
    for flag, size in (
        ("--global-batch-size", args.global_batch_size),
        ("--eval-global-batch-size", args.eval_global_batch_size),
    ):
        _require(
            size is None or size % num_ranks == 0,
            f"{flag} is {size}; it must be ranks x micro-batches, a multiple of {num_ranks} ranks "
            "(world size / (TP x PP))",
        )
    for attribute, off, flag, reason in REFUSED:
        value = getattr(args, attribute, off)
        _require(
            value == off or (not value and not off),
            f"{flag} is not supported with HBP: {reason}; leave it out",
        )
    _require(
        config.valid_corpus is None or args.eval_iters != 0,
        "--eval-iters 0 contradicts --hbp-valid-corpus; leave one of them out",
    )
    _require(
        not args.iterations_to_skip,
        "--iterations-to-skip is not supported with HBP: it would lose the samples of those steps",
    )
    _require(
        getattr(args, "gtp_weight_remat_size", 1) == 1,
        "--gtp-weight-remat-size above 1 is not supported with HBP",
    )
    _check_model(args)
    _check_device(args, config)


def check_levels_fit(args: Any, levels: tuple[Level, ...]) -> None:
    """Checks of the levels against the model and the layout."""
    budget = levels[0].tokens_per_rank
    for level in levels:
        _require(
            level.pack_len == args.seq_length * level.cp_size,
            f"level {level}: PACK_LEN must be S x CP with S = --seq-length {args.seq_length}; use "
            f"{args.seq_length * level.cp_size}:{level.cp_size}, or --seq-length "
            f"{level.tokens_per_rank}",
        )
        try:
            check_heads(*_heads_per_rank(args), level.cp_size)
        except ValueError as error:
            raise ValueError(f"level {level}: {error}") from None
        if level.recompute_layers != 0:
            _check_recompute(args, level)
    wanted = run_alignment(args, levels)
    _require(
        budget % wanted.budget_multiple == 0,
        f"--seq-length {budget} is not a multiple of {wanted.budget_multiple} (TP "
        f"{args.tensor_model_parallel_size} under sequence parallelism x the low-precision "
        f"recipe's multiple); use {-(-budget // wanted.budget_multiple) * wanted.budget_multiple}",
    )
    _require(
        args.max_position_embeddings >= levels[-1].pack_len,
        f"--max-position-embeddings {args.max_position_embeddings} is below the longest level "
        f"{levels[-1]}; raise it to {levels[-1].pack_len}",
    )


def run_alignment(args: Any, levels: tuple[Level, ...]) -> Alignment:
    """The alignment that this run needs."""
    return alignment(
        tuple(level.cp_size for level in levels),
        cp_layout="contiguous",
        tp_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        fp8_recipe=args.fp8_recipe if args.fp8 else None,
    )


def check_vocabulary(args: Any, max_token_id: int, corpus_path: str) -> None:
    """Raises ValueError when the corpus holds a token the model has no row for."""
    _require(
        max_token_id < args.padded_vocab_size,
        f"the corpus {corpus_path} holds token id {max_token_id}, the model's vocabulary has "
        f"{args.padded_vocab_size} rows; use the tokenizer that the corpus was prepared with",
    )


def _heads_per_rank(args: Any) -> tuple[int, int]:
    tp_size = args.tensor_model_parallel_size
    heads = args.num_attention_heads // tp_size
    if args.multi_latent_attention or not args.group_query_attention:
        return heads, heads
    return heads, max(1, args.num_query_groups // tp_size)


def _check_model(args: Any) -> None:
    _require(
        args.position_embedding_type == "rope" or args.use_rotary_position_embeddings,
        f"--position-embedding-type {args.position_embedding_type} is not supported with HBP; "
        "tested models use rope (with --rope-type yarn under MLA)",
    )
    _require(
        args.attention_dropout == 0.0,
        f"--attention-dropout is {args.attention_dropout}; with HBP it must be 0",
    )
    _require(
        getattr(args, "window_size", None) is None,
        "--window-size is not supported with HBP: attention is causal over whole documents",
    )
    _require(
        getattr(args, "softmax_type", "vanilla") == "vanilla",
        f"--softmax-type {getattr(args, 'softmax_type', '')} is not supported with HBP",
    )
    for attribute in ("use_transformer_engine_op_fuser", "use_grouped_gemm_for_dense_mlp"):
        _require(
            args.num_experts or not getattr(args, attribute),
            f"--{attribute.replace('_', '-')} is not supported with HBP for dense models: HBP "
            "builds the layers from the host's block spec, which leaves it out; leave it out too",
        )
    balancing = args.moe_router_load_balancing_type
    kinds = [balancing] if isinstance(balancing, str) else list(balancing)
    if args.num_experts:
        wrong = [kind for kind in kinds if kind not in _BALANCING_OK]
        _require(
            not wrong,
            f"--moe-router-load-balancing-type {' '.join(wrong)} is not supported with HBP: a "
            "rank's S tokens are many documents, not one sequence; use aux_loss, which is taken "
            "over a rank's S tokens, or none",
        )


def _check_recompute(args: Any, level: Level) -> None:
    _require(
        args.recompute_granularity != "full",
        f"--recompute-granularity full and the recompute of level {level} contradict each other; "
        "keep one: `full` in every level does what the flag does",
    )
    for attribute, flag in (
        ("cpu_offloading_num_layers", "--cpu-offloading-num-layers"),
        ("fine_grained_activation_offloading", "--fine-grained-activation-offloading"),
        ("distribute_saved_activations", "--distribute-saved-activations"),
    ):
        _require(
            not getattr(args, attribute, 0),
            f"{flag} is not supported with per-level recompute (level {level}); leave it out, or "
            "leave recompute out of the levels",
        )


def _check_device(args: Any, config: HbpConfig) -> None:
    if config.device != "cpu":
        _require(
            args.transformer_impl in ("local", "transformer_engine"),
            f"--transformer-impl is {args.transformer_impl}; HBP supports local and "
            "transformer_engine",
        )
        _require(
            args.transformer_impl != "local" or TorchVersion(torch.__version__) >= _VARLEN_TORCH,
            f"--transformer-impl local on CUDA needs torch {_VARLEN_TORCH} or later for its varlen "
            f"attention, this is {torch.__version__}; update torch or use transformer_engine",
        )
        return
    _require(
        args.distributed_backend == "gloo",
        f"--distributed-backend is {args.distributed_backend}; --hbp-device cpu needs gloo",
    )
    _require(
        args.transformer_impl == "local",
        f"--transformer-impl is {args.transformer_impl}; --hbp-device cpu needs local",
    )
    expert_tp_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    _require(
        not args.num_experts or expert_tp_size == 1,
        f"--expert-tensor-parallel-size is {expert_tp_size}; on CPU it must be 1: gloo has no "
        "uneven all-gather",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
