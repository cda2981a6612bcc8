"""Refuses a checkpoint whose weights and the model's do not match, key by key, before it is loaded.

By default the host loads what it finds: weights of the checkpoint that the model has no place for
are left out without a word, and a weight that the checkpoint lacks ends in a list of all keys.
Optimizer, random and rerun state are not looked at, so it works with --finetune, where the host's
own --dist-ckpt-strictness raise_all refuses them.
"""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor, check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.serialization import (
    load_content_metadata,
    load_tensors_metadata,
)
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from megatron.training.checkpointing import checkpoint_exists, get_load_checkpoint_path_by_args

from megatron_hbp.host.ending import end_every_rank

_CHECKED = ("assume_ok_unexpected", "raise_unexpected", "raise_all")
_NAMED = 4  # keys in a message


def check_loaded_weights(model: list[Any]) -> list[Any]:
    """For `GPTModelConfig.post_wrap_hooks`: the model as it came.

    Ends every rank with one line when a `torch_dist` checkpoint is about to be loaded that holds
    weights the model does not have, or lacks some. Off when --dist-ckpt-strictness says log, return
    or ignore.
    """
    args = get_args()
    load_arg = "load" if checkpoint_exists(args.load) else "pretrained_checkpoint"
    folder = getattr(args, load_arg)
    wanted = args.ckpt_format == "torch_dist" and args.dist_ckpt_strictness in _CHECKED
    if not wanted or not checkpoint_exists(folder):
        return model
    path = get_load_checkpoint_path_by_args(args, load_arg)
    if not check_is_distributed_checkpoint(path):
        end_every_rank(
            ValueError(
                f"the checkpoint {path} has no metadata.json: it is not whole or of another format "
                "than torch_dist; load another one, or convert it, see docs/weights.md"
            )
        )
    saved = {key for key in load_tensors_metadata(path) if not _is_optimizer(key)}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, _own_keys(model, path))
    try:
        check_keys(saved, set().union(*parts), folder)
    except ValueError as error:
        end_every_rank(error)
    return model


def check_keys(saved: set[str], built: set[str], folder: str) -> None:
    """Raises ValueError unless the checkpoint's weights are exactly the model's."""
    for keys, problem in (
        (saved - built, "holds weights that this model does not have"),
        (built - saved, "lacks weights that this model has"),
    ):
        if keys:
            more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
            raise ValueError(
                f"the checkpoint {folder} {problem}: {', '.join(sorted(keys)[:_NAMED])}{more}; "
                "give the flags of the model that it was made from, or --dist-ckpt-strictness "
                "log_all to load what matches"
            )


def _own_keys(model: list[Any], path: str) -> set[str]:
    metadata = dict(load_content_metadata(path) or {})
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    keys = set()
    for chunk in unwrap_model(model):
        state = chunk.sharded_state_dict(metadata=metadata)
        apply_factories(state)
        keys |= {entry.key for entry in nested_values(state) if isinstance(entry, ShardedTensor)}
    return keys


def _is_optimizer(key: str) -> bool:
    return key.startswith(("optimizer", "chained_"))
