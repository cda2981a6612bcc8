"""What the checkpoint that the host is about to load says about its run: read before it starts.

Guarantees (asserted by tests/host/test_resume_start.py):
- every rank reads the same file, the host's own common state, and needs no communication for it;
- what cannot be read here (formats other than `torch_dist`, local checkpoints) is told apart from
  what is not there;
- weights and checkpoints that are not where the host looks end the run before a model is built.
"""

import os
import pickle
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing import check_is_distributed_checkpoint, load_common_state_dict
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.msc_utils import maybe_msc
from megatron.training.checkpointing import (
    checkpoint_exists,
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    get_load_checkpoint_path_by_args,
    read_metadata,
)
from torch.distributed.checkpoint.api import CheckpointException

_UNREADABLE = (
    CheckpointingException,
    CheckpointException,  # torch's, of which no other class is a base but BaseException
    OSError,
    RuntimeError,
    EOFError,
    pickle.PickleError,
)
_NON_PERSISTENT = "non_persistent"  # the host's folder inside --load


@dataclass(frozen=True)
class Checkpoint:
    """args: the host's arguments when it was saved; None where its format is not read.

    schedule: the state of the host's learning-rate scheduler, None where it was not saved.
    """

    path: str
    iteration: int = 0
    args: Any = None
    schedule: dict[str, Any] | None = None


def checkpoint_to_load(args: Any) -> Checkpoint | None:
    """The checkpoint whose iteration and samples the host goes on from, None when it starts anew.

    args: the host's, validated. With --finetune, and where only --pretrained-checkpoint is there,
    the host counts from 0. Raises ValueError when the checkpoint is damaged.
    """
    if args.finetune or args.load is None:
        return None
    if args.non_persistent_ckpt_type == "local":
        return Checkpoint("local checkpoints")
    path = _path(args)
    if path is None:
        return None
    readable = args.auto_detect_ckpt_format or args.ckpt_format == "torch_dist"
    if not readable or not check_is_distributed_checkpoint(path):
        return Checkpoint(path)
    try:
        state = load_common_state_dict(path)
    except _UNREADABLE as error:
        reason = str(error).strip().splitlines()[-1:]
        raise ValueError(
            f"the checkpoint {path} cannot be read ({''.join(reason)}); load another one with "
            "--ckpt-step"
        ) from None
    return Checkpoint(
        path=path,
        iteration=state.get("iteration", 0),
        args=state.get("args"),
        schedule=state.get("opt_param_scheduler"),
    )


def check_weights(args: Any) -> None:
    """Raises ValueError when the weights that the run must start from are not where the host looks.

    args: the host's, validated. Without it the host ends after all models are built, or, with
    --finetune alone, trains random weights.
    """
    if checkpoint_exists(args.load):
        return
    weights = args.pretrained_checkpoint
    if weights is not None and not checkpoint_exists(weights):
        raise ValueError(
            f"neither --load {args.load} nor --pretrained-checkpoint {weights} holds a checkpoint: "
            f"there is no {get_checkpoint_tracker_filename(weights)}; give the folder above "
            "iter_..., see docs/weights.md"
        )
    if weights is not None:
        _tracked(args, "pretrained_checkpoint")
    elif args.finetune and args.load is not None:
        raise ValueError(
            f"--finetune without a checkpoint in --load {args.load} would train random weights: "
            f"there is no {get_checkpoint_tracker_filename(args.load)}; give the folder above "
            "iter_..., or leave --finetune out"
        )


def _tracked(args: Any, load_arg: str) -> str:
    """The folder that the tracker file, or --ckpt-step, names. Raises ValueError without one."""
    tracker = get_checkpoint_tracker_filename(getattr(args, load_arg))
    try:
        path = get_load_checkpoint_path_by_args(args, load_arg)
    except (SystemExit, AssertionError):  # the host would end here as if all were well
        raise ValueError(
            f"{tracker} names no iteration; write the number of the last whole iter_... folder "
            "beside it into it"
        ) from None
    if not maybe_msc.os.path.exists(path):
        raise ValueError(
            f"{'--ckpt-step' if args.ckpt_step else tracker} names {path}, which is not there; "
            "name one that is"
        )
    return path


def _path(args: Any) -> str | None:
    """As the host chooses: a non-persistent checkpoint unless a later persistent one is there."""
    persistent, iteration = None, -1
    if checkpoint_exists(args.load):
        persistent = _tracked(args, "load")
        iteration, _ = read_metadata(get_checkpoint_tracker_filename(args.load))
        iteration = args.ckpt_step or iteration
    if args.non_persistent_ckpt_type == "global":
        folder = args.non_persistent_global_ckpt_dir or os.path.join(args.load, _NON_PERSISTENT)
        if checkpoint_exists(folder):
            later, _ = read_metadata(get_checkpoint_tracker_filename(folder))
            if later >= iteration:
                return get_checkpoint_name(folder, later, False, return_base_dir=True)
    return persistent
