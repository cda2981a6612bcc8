"""Layouts judged twice: by our checks, and by the host until every stage is built."""

import argparse
import copy
import sys
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import add_megatron_arguments, validate_args

from megatron_hbp.host.fake_cluster import all_groups, as_rank
from megatron_hbp.host.layout_checks import check_layout, check_sizes
from megatron_hbp.host.meta_model import build_stage
from megatron_hbp.host.needed_flags import check_flags


def verdicts(command_lines: list[list[str]], world_sizes: list[int]) -> list[dict[str, Any]]:
    """Per command line {"ours": error or None, "host": error or None}."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found = []
    for argv, world_size in zip(command_lines, world_sizes, strict=True):
        args = parser.parse_args(argv)
        args.rank, args.world_size = 0, world_size
        found.append({"ours": _ours(copy.deepcopy(args)), "host": _hosts(args)})
    return found


def _ours(args: Any) -> str | None:
    before = copy.deepcopy(vars(args))
    try:
        check_sizes(args)
        check_layout(args, has_validation=False)
        check_flags(args, on_cpu=True)
    except ValueError as error:
        return str(error)
    finally:
        assert vars(args) == before, "a check changed an argument"
    return None


def _hosts(args: Any) -> str | None:
    """All that a start does up to the first forward, as the first rank of each stage."""
    sys.argv = ["pretrain_gpt"]
    try:
        validate_args(args)
        args.train_iters = 10
        config = gpt_config_from_args(args)
        layers = 0
        for rank in all_groups(args)["pp"][0]:
            with as_rank(args, rank):
                stage = build_stage(args, config, (1,))
            layers += sum(stage.chunk_dense_layers) + sum(stage.chunk_moe_layers)
        assert layers == args.num_layers
    except Exception as error:
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"
    return None
