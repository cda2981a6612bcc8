"""Checks of layers, stages, virtual stages and micro-batches: the host's rules in our words.

As layout_checks.py, whose guarantees are these, too. Rules: megatron-core 0.19, validate_args,
TransformerConfig.__post_init__, get_num_layers_to_build, PipelineParallelLayerLayout, and
forward_backward_pipelining_with_interleaving.
"""

from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_hbp.host.flag_words import divisors, flag_of, require

_PP = "--pipeline-model-parallel-size"
_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_LAYOUT = "--pipeline-model-parallel-layout"
_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
_PER_VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
# What the host may count as a layer when it spreads them.
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def check_pipeline(args: Any) -> None:
    """Layers over stages and virtual stages. args: not validated yet. Raises ValueError."""
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    uneven = [flag for flag, given in ((_FIRST, first), (_LAST, last)) if given is not None]
    counted = [flag_of(name) for name in _COUNTED if getattr(args, name)]
    virtual = [
        flag
        for flag, given in (
            (_PER_VIRTUAL, args.num_layers_per_virtual_pipeline_stage),
            (_VIRTUAL, args.num_virtual_stages_per_pipeline_rank),
            (_LAYOUT, args.pipeline_model_parallel_layout),
        )
        if given is not None
    ]
    for group in (virtual, [*uneven[:1], *counted[:1]]):
        require(len(group) < 2, f"{' and '.join(group)} exclude each other; keep one")
    if virtual == [_LAYOUT]:
        require(
            not uneven and not counted,
            f"{_LAYOUT} and {' '.join([*uneven, *counted])} exclude each other; keep one",
        )
        _check_layout_text(args)
    else:
        require(
            not (uneven and virtual == [_PER_VIRTUAL]),
            f"{_PER_VIRTUAL} does not go with {' '.join(uneven)}; use {_VIRTUAL}",
        )
        for flag, given in (
            (_FIRST, first),
            (_LAST, last),
            (_PER_VIRTUAL, args.num_layers_per_virtual_pipeline_stage),
            (_VIRTUAL, args.num_virtual_stages_per_pipeline_rank),
        ):
            require(given is None or given >= 1, f"{flag} is {given}; it must be 1 or more")
        require(
            stages <= _counted_layers(args),
            f"{_PP} {stages} is above --num-layers {layers}; use at most as many stages as layers",
        )
        sizes = _uneven_sizes(args, uneven) if uneven else _even_sizes(args)
        _check_virtual_sizes(args, sizes)
    number = virtual_stages(args)
    require(
        number == 1 or stages > 1,
        f"{' '.join(virtual)} gives {number} virtual stages, which need {_PP} of 2 or more; leave "
        "it out",
    )
    require(
        number == 1 or stages > 2 or args.overlap_p2p_comm,
        f"--no-overlap-p2p-communication with virtual stages needs {_PP} of 3 or more; leave it "
        "out",
    )


def check_microbatches(args: Any, *, has_validation: bool) -> None:
    """Virtual stages take micro-batches in groups: of as many as stages, or as a flag says.

    has_validation: whether a validation corpus is evaluated.
    """
    if virtual_stages(args) == 1:
        return
    stages, ranks = args.pipeline_model_parallel_size, _num_ranks(args)
    group = args.microbatch_group_size_per_vp_stage or stages
    require(
        group >= stages,
        f"--microbatch-group-size-per-virtual-pipeline-stage is {group}; it must be at least {_PP} "
        f"{stages}; leave it out",
    )
    batches = [("--global-batch-size", _microbatches(args))]
    if has_validation and args.eval_global_batch_size is not None:
        batches.append(("--eval-global-batch-size", args.eval_global_batch_size // ranks))
    for flag, count in batches:
        require(
            count >= group and (count % group == 0 or count % group >= stages),
            f"{flag} gives {count} micro-batches a step, which virtual stages take in groups of "
            f"{group} ({_PP} {stages}): {count} is no multiple; use {flag} "
            f"{-(-count // group) * group * ranks}",
        )


def virtual_stages(args: Any) -> int:
    """Virtual stages of each pipeline stage, from flags that check_layout() has passed."""
    stages = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        text = args.pipeline_model_parallel_layout
        return PipelineParallelLayerLayout.get_num_stages_from_str(text) // stages
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return args.num_virtual_stages_per_pipeline_rank
    if args.num_layers_per_virtual_pipeline_stage is not None:
        return _counted_layers(args) // stages // args.num_layers_per_virtual_pipeline_stage
    return 1


def _even_sizes(args: Any) -> set[int]:
    """Layers of a stage, embedding and loss counted where the flags say so."""
    stages, counted = args.pipeline_model_parallel_size, _counted_layers(args)
    last = args.num_layers - -(-args.num_layers // stages) * (stages - 1)
    if last < 1:
        last = args.num_layers - args.num_layers // stages * (stages - 1)
    require(
        counted % stages == 0,
        f"--num-layers {args.num_layers} is no multiple of {_PP} {stages}"
        + (f" (with what is counted as a layer {counted})" if counted != args.num_layers else "")
        + f"; use a PP size that divides it, or {_LAST} {last}",
    )
    return {counted // stages}


def _uneven_sizes(args: Any, flags: list[str]) -> set[int]:
    """Layers of the first, last and other stages."""
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    ends = [
        size
        for size in (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
        if size is not None
    ]
    left, others = layers - sum(ends), stages - len(ends)
    given = " ".join(f"{flag} {size}" for flag, size in zip(flags, ends, strict=True))
    fits = left == 0 if others == 0 else others > 0 and left > 0 and left % others == 0
    require(
        fits,
        f"{given}: {left} of --num-layers {layers} are left for {max(others, 0)} other stages "
        f"({_PP} {stages}); choose ends that leave each of them the same number of 1 or more",
    )
    return {*ends, left // others} if others else set(ends)


def _check_virtual_sizes(args: Any, sizes: set[int]) -> None:
    each, number = (
        args.num_layers_per_virtual_pipeline_stage,
        args.num_virtual_stages_per_pipeline_rank,
    )
    for size in sorted(sizes):
        require(
            each is None or size % each == 0,
            f"{_PER_VIRTUAL} {each} does not divide the {size} layers of a stage; use one of "
            f"{divisors(size)}",
        )
        require(
            number is None or size % number == 0,
            f"{_VIRTUAL} {number} does not divide the {size} layers of a stage; use one of "
            f"{divisors(size)}, or other numbers of layers per stage",
        )


def _check_layout_text(args: Any) -> None:
    """The host's own parser judges; its assertions come back as one line."""
    text, stages = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    try:
        parsed = PipelineParallelLayerLayout(text, stages)
        parsed.validate_layer_layout(num_layers=args.num_layers, mtp_num_layers=None)
    except AssertionError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{_LAYOUT} {text} does not describe --num-layers {args.num_layers} on {_PP} {stages}: "
            f"{reason}; give E, one t a layer, L, and | between stages"
        ) from None


def _counted_layers(args: Any) -> int:
    return args.num_layers + sum(bool(getattr(args, name)) for name in _COUNTED)


def _num_ranks(args: Any) -> int:
    return args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)


def _microbatches(args: Any) -> int:
    """Of a step; the host takes one where the flag is missing."""
    return 1 if args.global_batch_size is None else args.global_batch_size // _num_ranks(args)
