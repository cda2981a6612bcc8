"""torchrun -m megatron_hbp.host.pretrain_gpt <Megatron flags> --hbp-...

Megatron-LM's GPT training with HBP. `setup` is also what the patched stock script calls.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from megatron_hbp.config import HbpConfig, add_arguments, config_from_args, in_flags

ArgumentsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def prepare_device(argv: list[str] | None = None) -> None:
    """Installs the CPU runtime when the flags (of this process when None) ask for it.

    Must come before megatron is imported.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--hbp-device", default="cuda")
    if parser.parse_known_args(argv)[0].hbp_device == "cpu":
        import torch

        from megatron_hbp.host import cpu

        cpu.install()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def with_arguments(provider: ArgumentsProvider | None) -> ArgumentsProvider:
    """An `extra_args_provider` that adds the --hbp-* flags after those of another one, if any.

    It also checks the command line, which is known here and not validated yet: what does not fit
    HBP ends the process in our words, before an assertion of the host does.
    """

    def both(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        from megatron_hbp.host import compat

        parser = add_arguments(parser if provider is None else provider(parser))
        compat.make_help_printable(parser)
        _check_command_line_or_exit(parser)
        return parser

    return both


def _check_command_line_or_exit(parser: argparse.ArgumentParser) -> None:
    from megatron_hbp.host import checks

    args = parser.parse_known_args()[0]
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))  # where the host reads it
    try:
        config = config_from_args(args)
        if config.enabled and not args.use_checkpoint_args:  # else the model is not known yet
            checks.check_command_line(args, config)
    except ValueError as error:
        sys.exit(f"megatron_hbp: error: {error}")


def setup_or_exit(args: Any, model_config: Any) -> Any | None:
    """`setup`; what does not fit ends the process with one line."""
    try:
        return setup(args, model_config)
    except ValueError as error:
        sys.exit(f"megatron_hbp: error: {in_flags(str(error))}")


def setup(args: Any, model_config: Any) -> Any | None:
    """Turns the plugin on for parsed arguments; None when no --hbp-* flag asks for it.

    args: the host's, parsed and validated. model_config: its GPTModelConfig, which gets our layer
    spec and the auxiliary-loss scale. Returns an HbpTraining whose `datasets_provider` and
    `forward_step` replace the host's. Raises ValueError for whatever does not fit.
    """
    config = config_from_args(args)
    if not config.enabled:
        return None
    from megatron_hbp.host import compat

    compat.check_host_version()
    return _setup(config, args, model_config)


def run_shape(args: Any) -> Any:
    """plan_source.RunShape of the host's arguments, validated."""
    from megatron_hbp.host import checks
    from megatron_hbp.host.plan_source import RunShape

    return RunShape(
        rank=args.rank,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        num_ranks=args.data_parallel_size,
        num_microbatches=args.global_batch_size // args.data_parallel_size,
        num_stages=args.pipeline_model_parallel_size,
        num_virtual_stages=args.virtual_pipeline_model_parallel_size or 1,
        alignment_of=lambda levels: checks.run_alignment(args, levels),
    )


def _setup(config: HbpConfig, args: Any, model_config: Any) -> Any:
    from megatron_hbp.corpus.joint import parts_of
    from megatron_hbp.host import checks
    from megatron_hbp.host.aux_scale import AuxScale
    from megatron_hbp.host.checkpoint import check_weights
    from megatron_hbp.host.iterations import set_iterations
    from megatron_hbp.host.layer_spec import hbp_layer_spec
    from megatron_hbp.host.plan_source import training_plan, validation_plan
    from megatron_hbp.host.resume import find_start
    from megatron_hbp.host.training import HbpTraining
    from megatron_hbp.host.weights import check_loaded_weights

    checks.check_arguments(args, config)
    check_weights(args)
    if config.level:
        checks.check_levels_fit(args, config.level)
    shape = run_shape(args)
    plan, corpus = training_plan(config, shape)
    checks.check_levels_fit(args, plan.levels)
    valid = validation_plan(
        config, plan, args.eval_global_batch_size // args.data_parallel_size, shape
    )
    for part in (*parts_of(corpus), *(valid[1:] if valid else ())):
        checks.check_vocabulary(args, part.max_token_id, str(part.path))
    start = find_start(args, plan)
    set_iterations(args, plan, valid[0] if valid else None, start)

    transformer = model_config.transformer
    cp_sizes = tuple(sorted({level.cp_size for level in plan.levels}))
    model_config.transformer_layer_spec = functools.partial(hbp_layer_spec, cp_sizes=cp_sizes)
    model_config.post_wrap_hooks.append(check_loaded_weights)
    aux_scale = None
    if transformer.num_moe_experts is not None:
        aux_scale = transformer.moe_grad_scale_func = AuxScale(transformer)
    return HbpTraining(config, plan, corpus, valid, aux_scale, start)


def main() -> None:
    """Parses, sets up and trains; without --hbp-* flags there is nothing to do here."""
    prepare_device()
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_hbp.host import compat

    compat.check_host_version()
    compat.use_bundled_dataset_helpers()
    args = parse_and_validate_args(extra_args_provider=with_arguments(None))
    model_config = gpt_config_from_args(args)
    training = setup_or_exit(args, model_config)
    if training is None:
        sys.exit(
            "megatron_hbp: error: no --hbp-plan and no --hbp-corpus; name one, or train with "
            "Megatron-LM's own pretrain_gpt.py"
        )
    pretrain(
        cfg_container=pretrain_cfg_container_from_args(args, model_config),
        train_valid_test_dataset_provider=training.datasets_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=training.forward_step,
    )


if __name__ == "__main__":
    main()
