"""Which micro-batches a rank reads, and in what order.

Guarantees:
- the order is a function of the plan and the number of consumed steps only: not of workers, ranks,
  the clock or random state;
- every rank of a plan reads the same number of micro-batches;
- resumed after k steps, the sequence equals the uninterrupted one from step k on.
"""

from collections.abc import Iterator

from megatron_hbp.plan import Plan


class MicrobatchSampler:
    """Micro-batch indices from `consumed_steps` to the end of the plan, over all epochs.

    Raises ValueError when the plan has fewer steps than were consumed.
    """

    def __init__(self, plan: Plan, consumed_steps: int = 0) -> None:
        if not 0 <= consumed_steps <= plan.num_steps:
            raise ValueError(
                f"{consumed_steps} steps are consumed, the plan has {plan.num_steps}: the "
                "checkpoint belongs to another plan; start with the plan that it was trained on"
            )
        self.start = consumed_steps * plan.num_microbatches
        self.end = plan.num_steps * plan.num_microbatches

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __len__(self) -> int:
        return self.end - self.start


class CyclicSampler:
    """The whole plan again and again: evaluation restarts exactly at its first micro-batch."""

    def __init__(self, plan: Plan) -> None:
        self.length = plan.num_steps * plan.num_microbatches

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(self.length)
