"""A job that says how many parameters each rank's model has."""

import sys
from typing import Any

from megatron.core.utils import unwrap_model
from megatron.training import training as host_training

from megatron_hbp.host import pretrain_gpt


def count(argv: list[str]) -> dict[str, int]:
    """Parameters of this rank, routed experts by themselves; trains what argv says."""
    sys.argv = ["pretrain_gpt", *argv]
    counts = {"dense": 0, "experts": 0}
    original = host_training.setup_model_and_optimizer

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for chunk in unwrap_model(result[0]):
            for name, parameter in chunk.named_parameters():
                kind = "experts" if ".local_experts." in name else "dense"
                counts[kind] += parameter.numel()
        return result

    host_training.setup_model_and_optimizer = counted
    pretrain_gpt.main()
    return counts
