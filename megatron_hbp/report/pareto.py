"""What other packing settings would give: packer x levels x mixing, and which are best at what.

Guarantees (asserted by tests/unit/test_report_pareto.py):
- the settings of the plan are among the points, once;
- a point is on the front exactly when no other is at least as good in every goal and better in one;
- the same plan gives the same points; settings that give the same figures are one point.
Figures of more than SAMPLE sequences are those of a random sample, the same for every point.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from megatron_hbp.alignment import Alignment
from megatron_hbp.baselines import plan_placement
from megatron_hbp.config import PACKERS
from megatron_hbp.cost import DENSE_8B_H100
from megatron_hbp.level import Level
from megatron_hbp.metrics import placement_metrics
from megatron_hbp.plan import Plan
from megatron_hbp.planner import build_plan

SAMPLE = 500_000
# Goals of the front: name in the metrics, heading, whether more is better.
GOALS = (
    ("attention_balance_ratio", "ABR", False),
    ("communication_ratio", "CR", False),
    ("padding_ratio", "PR", False),
    ("mixing_ratio", "mixing", False),
    ("pipeline_stretch", "stretch", False),
    ("tokens_per_rank", "Ave-T", True),
)
_MIXING_BOUNDS = (0.0, 1.5, 3.0, 6.0)
_LIKE_SAME = 12  # digits in which figures agree that are called the same


@dataclass(frozen=True)
class Setting:
    """What build_plan() is called with; num_microbatches keeps the tokens of a step."""

    levels: tuple[Level, ...]
    num_microbatches: int
    packer: str
    mixing: str
    max_mixing: float

    def __str__(self) -> str:
        levels = " + ".join(f"{level.pack_len}:{level.cp_size}" for level in self.levels)
        bound = f" (at most {self.max_mixing:g})" if self.max_mixing else ""
        return f"{levels}, {self.packer}, mixing {self.mixing}{bound}"


@dataclass(frozen=True)
class Point:
    """values: by goal name. front: no other point is at least as good in all of them."""

    setting: Setting
    values: dict[str, float]
    own: bool
    front: bool = False


@dataclass(frozen=True)
class Search:
    """sequences: how many were planned, of `of`. failed: settings that are not possible."""

    points: list[Point]
    sequences: int
    of: int
    failed: int


def search(plan: Plan, progress: Callable[[str], None]) -> Search:
    """Plans a sample of the kept sequences in every setting. progress: called with lines."""
    kept = np.flatnonzero(plan.seq_lens > 0)
    if len(kept) > SAMPLE:
        rng = np.random.Generator(np.random.PCG64(plan.seed))
        chosen = np.sort(rng.choice(kept, SAMPLE, replace=False))
    else:
        chosen = kept
    lens = np.ascontiguousarray(plan.seq_lens[chosen])
    sources = None if plan.source_ids is None else np.ascontiguousarray(plan.source_ids[chosen])
    own = Setting(
        tuple(replace(level, recompute_layers=0) for level in plan.levels),
        plan.num_microbatches,
        plan.packer,
        "auto" if plan.alike else plan.mixing,
        plan.max_mixing,
    )
    settings = [own, *(setting for setting in _settings(plan, own) if setting != own)]
    points: dict[tuple[float, ...], Point] = {}
    failed = 0
    for index, setting in enumerate(settings):
        if index % 20 == 0:
            progress(f"planning {len(lens)} sequences in other ways ({index} of {len(settings)})")
        try:
            values = _values(plan, setting, lens, sources)
        except ValueError:
            failed += 1
            continue
        same = tuple(round(value, _LIKE_SAME) for value in values.values())
        points.setdefault(same, Point(setting, values, setting == own))
    found = list(points.values())
    signs = np.array([-1.0 if more else 1.0 for _, _, more in GOALS])
    table = signs * np.array([list(point.values.values()) for point in found])
    return Search(
        [replace(p, front=on) for p, on in zip(found, on_front(table).tolist(), strict=True)],
        len(lens),
        len(kept),
        failed,
    )


def on_front(table: np.ndarray) -> np.ndarray:
    """bool [points]: no other row is at most as large everywhere and smaller somewhere.

    table: float64 [points, goals], less is better.
    """
    no_worse = (table[:, None] <= table[None]).all(axis=2)
    better = (table[:, None] < table[None]).any(axis=2)
    return ~(no_worse & better).any(axis=0)


def _settings(plan: Plan, own: Setting) -> Iterator[Setting]:
    modes = [("microbatch", 0.0), ("step", 0.0)]
    if plan.num_stages > 1:
        modes += [("auto", bound) for bound in _MIXING_BOUNDS]
    choices = dict.fromkeys([(own.levels, own.num_microbatches), *_level_choices(plan)])
    for levels, num_microbatches in choices:
        for packer in PACKERS:
            for mixing, bound in modes:
                yield Setting(levels, num_microbatches, packer, mixing, bound)


def _level_choices(plan: Plan) -> Iterator[tuple[tuple[Level, ...], int]]:
    """For half, the same and twice the token budget: the longest level alone, with CP 1, with all
    powers of two between.
    """
    longest = plan.levels[-1].pack_len
    for times in (1, 2, 0.5):
        budget = int(plan.token_budget * times)
        microbatches = plan.num_microbatches / times
        if budget * plan.num_microbatches != plan.token_budget * times * plan.num_microbatches:
            continue
        if microbatches != int(microbatches) or longest % budget:
            continue
        most = longest // budget
        if plan.num_ranks % most:
            continue
        powers = [1 << power for power in range(most.bit_length()) if most % (1 << power) == 0]
        for sizes in ([most], [1, most], [*powers, most]):
            levels = tuple(Level(budget * size, size) for size in sorted(set(sizes)))
            yield levels, int(microbatches)


def _values(
    plan: Plan, setting: Setting, lens: np.ndarray, sources: np.ndarray | None
) -> dict[str, float]:
    """By goal. Raises ValueError for a setting that cannot be."""
    made = build_plan(
        lens,
        setting.levels,
        plan.num_ranks,
        setting.num_microbatches,
        plan.num_stages,
        num_virtual_stages=plan.num_virtual_stages,
        seed=plan.seed,
        packer=setting.packer,
        mixing=setting.mixing,
        max_mixing=setting.max_mixing,
        curriculum_steps=plan.curriculum_steps if setting.levels[0].cp_size == 1 else 0,
        cost=plan.cost,
        alignment=Alignment(
            plan.alignment.budget_multiple,
            tuple(_multiple(plan, level) for level in setting.levels),
        ),
        source_ids=sources,
    )
    found = placement_metrics(
        plan_placement(made), plan.num_stages, cost=plan.cost or DENSE_8B_H100
    )
    return {name: found[name] for name, _, _ in GOALS}


def _multiple(plan: Plan, level: Level) -> int:
    """What documents are rounded up to: as at the plan's level of this CP size, else the most."""
    for own, multiple in zip(plan.levels, plan.alignment.document_multiples, strict=True):
        if own.cp_size == level.cp_size:
            return multiple
    return 1 if level.cp_size == 1 else max(plan.alignment.document_multiples)
