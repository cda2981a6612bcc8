"""Trains and notes what kind of iterator the host's loop was given."""

from typing import Any

from megatron.training import training as host_training

from tests.distributed.jobs import train as plain_train


def train(argv: list[str]) -> dict[str, Any]:
    """`jobs.train`'s result and "iterators", the types that the training loop read from."""
    original, kinds = host_training.train_step, set()

    def noted(forward_step: Any, data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        kinds.add(type(data_iterator).__name__)
        return original(forward_step, data_iterator, *args, **kwargs)

    host_training.train_step = noted
    return plain_train(argv) | {"iterators": sorted(kinds)}
