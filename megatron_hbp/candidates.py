"""What may be chosen: CP sizes that heads and ranks allow, token budgets that memory allows.

Guarantees (asserted by tests/unit/test_select.py):
- CP sizes divide the ranks and the heads, by the rule that the run checks at start-up;
- budgets are multiples of the run's alignment; the longest sequence fits the largest CP size;
- when nothing is left, the error names the smallest budget that would do.
"""

import math
from dataclasses import dataclass

from megatron_hbp.cost_model import CostModel
from megatron_hbp.histogram import LengthHistogram
from megatron_hbp.level import Level
from megatron_hbp.packing import MAX_CAPACITY
from megatron_hbp.run_layout import check_cp_size


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """token_budgets: S to choose from, in tokens (None: a geometric grid of `per_doubling` budgets
    for each factor of two, from the smallest that holds the longest sequence at the largest CP size
    to the largest that memory allows or that the longest sequence can use at CP 1). cp_sizes: to
    choose from (None: every divisor of the ranks). budget_multiple: what S is a multiple of
    (alignment.Alignment). tokens_per_step: the optimizer step to keep, whatever the budget: a step
    has as many micro-batches as come nearest (None: as many as the layout says, so that a smaller
    budget makes smaller steps). Raises ValueError for numbers below 1 and for nothing to choose
    from.
    """

    token_budgets: tuple[int, ...] | None = None
    cp_sizes: tuple[int, ...] | None = None
    budget_multiple: int = 1
    per_doubling: int = 16
    tokens_per_step: int | None = None

    def __post_init__(self) -> None:
        for name in ("token_budgets", "cp_sizes"):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise ValueError(
                    f"{name} is {list(values)}; name at least one, each 1 or more, or None for all"
                )
        for name in ("budget_multiple", "per_doubling", "tokens_per_step"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        unfit = [size for size in self.token_budgets or () if size % self.budget_multiple]
        if unfit:
            raise ValueError(
                f"token budget {unfit[0]} is no multiple of {self.budget_multiple}, which the "
                f"run's TP and FP8 recipe need; use {self.rounded(unfit[0])}"
            )

    def rounded(self, budget: float) -> int:
        """The smallest multiple of budget_multiple that is at least `budget`."""
        return max(1, math.ceil(budget / self.budget_multiple)) * self.budget_multiple


def allowed_cp_sizes(
    cost: CostModel, candidates: Candidates
) -> tuple[tuple[int, ...], list[tuple[int, str]]]:
    """The CP sizes that the run can have, ascending, and those that it cannot have with the reason.

    Raises ValueError when none is left.
    """
    ranks = cost.layout.num_ranks
    wanted = candidates.cp_sizes
    if wanted is None:
        wanted = tuple(size for size in range(1, ranks + 1) if ranks % size == 0)
    allowed, refused = [], []
    for size in sorted(set(wanted)):
        try:
            check_cp_size(cost.model, cost.layout, size)
        except ValueError as error:
            refused.append((size, str(error)))
        else:
            allowed.append(size)
    if not allowed:
        raise ValueError(f"no CP size is left: {refused[0][1]}")
    return tuple(allowed), refused


def token_budgets(
    histogram: LengthHistogram,
    cost: CostModel,
    candidates: Candidates,
    cp_sizes: tuple[int, ...],
) -> tuple[int, ...]:
    """The budgets to look at, ascending. Raises ValueError when none holds the longest sequence in
    memory, with the smallest that would do and what it needs.
    """
    smallest = candidates.rounded(histogram.longest / cp_sizes[-1])
    given = candidates.token_budgets
    if given is not None:
        if max(given) < smallest:
            raise ValueError(
                f"the longest sequence has {histogram.longest} tokens, the largest candidate, "
                f"{max(given)} tokens per rank at CP {cp_sizes[-1]}, holds "
                f"{max(given) * cp_sizes[-1]}; the smallest S that would do is {smallest}; or "
                "leave out or cut the longest sequences"
            )
        holding = tuple(sorted({budget for budget in given if budget >= smallest}))
        if not any(_fits(cost, budget, cp_sizes) for budget in holding):
            raise ValueError(_too_much(cost, holding[0], cp_sizes))
        return holding
    if not _fits(cost, smallest, cp_sizes):
        raise ValueError(
            f"the longest sequence has {histogram.longest} tokens, which take S of at least "
            f"{smallest} at CP {cp_sizes[-1]}: {_too_much(cost, smallest, cp_sizes)}"
        )
    useful = min(
        round_budget(max(histogram.longest / cp_sizes[0], smallest), candidates),
        MAX_CAPACITY // cp_sizes[-1] // candidates.budget_multiple * candidates.budget_multiple,
    )
    largest = _largest_fitting(cost, smallest, useful, candidates, cp_sizes)
    # the next lower round number of the largest
    found = {smallest, round_budget(largest / 33 * 32, candidates)}
    found |= {round_budget(histogram.longest / size, candidates) for size in cp_sizes}
    for step in range(math.floor(math.log2(largest / smallest) * candidates.per_doubling) + 1):
        budget = smallest * 2 ** (step / candidates.per_doubling)
        found.add(round_budget(budget, candidates))
    if smallest < round_budget(smallest, candidates) <= largest:
        found.discard(smallest)
    return tuple(sorted(budget for budget in found if smallest <= budget <= largest))


def round_budget(budget: float, candidates: Candidates) -> int:
    """The next budget of six binary digits: kernels like round numbers."""
    unit = 2 ** max(0, math.floor(math.log2(budget)) - 5)
    return candidates.rounded(math.ceil(budget / unit) * unit)


def _largest_fitting(
    cost: CostModel, smallest: int, useful: int, candidates: Candidates, cp_sizes: tuple[int, ...]
) -> int:
    """The largest multiple up to `useful` that fits in memory; `smallest` does."""
    if useful <= smallest or _fits(cost, useful, cp_sizes):
        return max(useful, smallest)
    low = smallest // candidates.budget_multiple
    high = useful // candidates.budget_multiple
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(cost, middle * candidates.budget_multiple, cp_sizes):
            low = middle
        else:
            high = middle
    return low * candidates.budget_multiple


def _fits(cost: CostModel, budget: int, cp_sizes: tuple[int, ...]) -> bool:
    return any(cost.least_recompute(budget * size, size) is not None for size in cp_sizes)


def _too_much(cost: CostModel, budget: int, cp_sizes: tuple[int, ...]) -> str:
    needed = min(cost.memory(Level(budget * size, size, "full")).total for size in cp_sizes)
    return (
        f"no candidate fits in memory: {budget} tokens per rank need {needed / 2**30:.1f} GiB with "
        f"every layer recomputed, {cost.device.name} has "
        f"{cost.device.memory_bytes / 2**30:.1f} GiB; use more tensor or pipeline parallelism, or "
        "leave out or cut the longest sequences"
    )
