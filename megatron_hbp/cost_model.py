"""Time and memory of a micro-batch and of a step, from a model, a device and a layout. Pure.

A micro-batch on a rank and stage, forward and backward, takes
    fixed          launch_seconds x layers
  + linear         matrix products of S tokens / achieved FLOP/s, forward once, backward twice
  + attention      sum of squared lengths / CP: Ulysses gives each CP rank its share of the heads
  + CP, TP and MoE communication, forward and backward alike: bytes / bandwidth; a share of TP's is
                   hidden (TP_OVERLAP), nothing of the others
  + recompute      the forward of the recomputed layers once more, its communication included.
A step adds fill and drain of the pipeline, its stalls by unequal micro-batches, and the part of the
data-parallel reduction that is not hidden. The stage counted is the slowest one of the level.

Left out: sends between stages (overlapped by Megatron's 1F1B), the optimizer's own step, latencies
of collectives (in launch_seconds), gradients of repeated key/value heads.

Guarantees (asserted by tests/unit/test_cost_model.py):
- a slower network never makes communication cheaper; more recompute never takes less time; a larger
  CP size never takes more attention time at equal squares;
- pack_cost() orders full packs as pack_seconds() does.
"""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal

import numpy as np

from megatron_hbp.cost import PackCost
from megatron_hbp.fit import FitReport, fit_scales
from megatron_hbp.hardware import Device, find_device
from megatron_hbp.level import Level
from megatron_hbp.memory_model import Memory, stage_memory
from megatron_hbp.micro_batch import REPEATED, MicroBatchTerms, PackSeconds, Scales
from megatron_hbp.model_shape import ModelShape
from megatron_hbp.models import find_model
from megatron_hbp.profile import Profile
from megatron_hbp.reduction import reduction_seconds
from megatron_hbp.run_layout import (
    RunLayout,
    Stage,
    check_cp_size,
    check_layout,
    stages_of,
)


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step. microbatches: the slowest rank's, one after another."""

    microbatches: float
    pipeline_fill: float
    stall: float
    reduction: float

    @property
    def total(self) -> float:
        return self.microbatches + self.pipeline_fill + self.stall + self.reduction


@dataclass(frozen=True)
class CostModel:
    """model on device in layout. Raises ValueError when the layout cannot hold the model.

    scales: factors of a fit.
    """

    model: ModelShape
    device: Device
    layout: RunLayout
    scales: Scales = field(default_factory=Scales)

    def __post_init__(self) -> None:
        check_layout(self.model, self.layout)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is unusual about the layout, in words."""
        return check_layout(self.model, self.layout)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.model, self.layout)

    def check_cp_size(self, cp_size: int) -> None:
        """Raises ValueError when the heads or the ranks do not allow the CP size."""
        check_cp_size(self.model, self.layout, cp_size)

    def pack_seconds(
        self,
        level: Level,
        counts: np.ndarray,
        tokens: np.ndarray,
        squares: np.ndarray,
        *,
        padded: bool = True,
    ) -> PackSeconds:
        """Seconds of packs of a level.

        counts, tokens, squares: [packs], sequences, their tokens, the sum of their squared
        lengths. padded: all that grows with tokens is charged for the S tokens of a rank, padding
        included; else for tokens / CP, for methods whose packs differ in size. Raises ValueError
        for a CP size that the heads do not allow.
        """
        self.check_cp_size(level.cp_size)
        held = np.full(len(counts), float(level.tokens_per_rank))
        if not padded:
            held = np.asarray(tokens, dtype=np.float64) / level.cp_size
        squares = np.asarray(squares, dtype=np.float64)
        return self._scaled(level, held, squares / level.cp_size)

    def step_seconds(self, times: np.ndarray) -> StepSeconds:
        """times: float64 [micro-batches, ranks], seconds of a stage; ranks run in lockstep.

        Stages count as equal, each as the slowest one of the level: the pipeline takes
        sum t + (stages - 1) / virtual stages x max t.
        """
        slowest = np.asarray(times, dtype=np.float64).max(axis=1, initial=0.0)
        bubble = (self.layout.num_stages - 1) / self.layout.num_virtual_stages
        mean = float(slowest.mean()) if len(slowest) else 0.0
        return StepSeconds(
            microbatches=float(slowest.sum()),
            pipeline_fill=bubble * mean,
            stall=bubble * (float(slowest.max(initial=0.0)) - mean),
            reduction=self.reduction_seconds,
        )

    @cached_property
    def reduction_seconds(self) -> float:
        """Seconds of the data-parallel reduction that nothing hides (see reduction.py)."""
        return reduction_seconds(self.model, self.device, self.layout)

    def memory(self, level: Level) -> Memory:
        """Memory of the fullest GPU when all micro-batches in flight are of the level."""
        return max(self.stage_memories(level), key=lambda memory: memory.total)

    def stage_memories(self, level: Level) -> tuple[Memory, ...]:
        """Memory of a GPU of each stage."""
        self.check_cp_size(level.cp_size)
        return tuple(
            stage_memory(
                self.model,
                self.layout,
                stage,
                tokens=level.tokens_per_rank,
                cp_size=level.cp_size,
                recompute_layers=level.recompute_layers,
            )
            for stage in self.stages
        )

    def check_fits(self, level: Level) -> None:
        """Raises ValueError when the fullest GPU cannot hold what the level needs."""
        needed = self.memory(level)
        if needed.total <= self.device.memory_bytes:
            return
        parts = {
            part.name: getattr(needed, part.name) / 2**30
            for part in fields(Memory)
            if getattr(needed, part.name)
        }
        listed = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items())
        raise ValueError(
            f"level {level} of {self.model.name} needs {needed.total / 2**30:.1f} GiB ({listed}), "
            f"{self.device.name} has {self.device.memory_bytes / 2**30:.1f}; use more recompute, a "
            "smaller token budget, or more TP, EP or stages"
        )

    def least_recompute(self, pack_len: int, cp_size: int) -> int | Literal["full"] | None:
        """Fewest recomputed layers of the whole model that fit in memory; None when none do.

        "full" where a number of layers, spread evenly over uneven chunks, does not reach them all.
        """
        chunks, whole = self.layout.num_chunks, self.model.num_layers
        choices: list[int | Literal["full"]] = [
            min(each * chunks, whole) for each in range(-(-whole // chunks) + 1)
        ]
        if max(self.layout.chunk_layers, default=0) > -(-whole // chunks):
            choices.append("full")
        for layers in choices:
            needed = self.memory(Level(pack_len, cp_size, layers)).total
            if needed <= self.device.memory_bytes:
                return layers
        return None

    def pack_cost(self, levels: tuple[Level, ...] = ()) -> PackCost:
        """The same as a PackCost in seconds, for the planner, which has one for all levels.

        levels: those it will plan; recompute and CP communication are their means (none: no
        recompute, and the communication of the largest CP size inside a node).
        """
        planned = levels or (Level(1, 1),)
        long = [level for level in planned if level.cp_size > 1]
        if not levels:
            long = [Level(cp_size, cp_size) for cp_size in self._cp_sizes_of_node()[-1:]]
        alone = [replace(level, pack_len=level.tokens_per_rank, cp_size=1) for level in planned]
        sent = [self._rate(level, 1.0, 0.0, communication=True) for level in long]
        return PackCost(
            linear=_mean([self._rate(level, 1.0, 0.0) for level in alone]),
            quadratic=_mean([self._rate(level, 0.0, 1.0) for level in alone]),
            communication=_mean(sent),
        )

    def _rate(
        self, level: Level, tokens: float, squares: float, *, communication: bool = False
    ) -> float:
        """Seconds of a rank without the fixed ones, or of its CP communication alone."""
        of = self._scaled(level, np.array([tokens]), np.array([squares]))
        seconds = of.total - of.fixed
        if communication:
            again = self._terms.seconds(level, np.array([tokens]), np.array([squares]))
            repeated = sum(getattr(self.scales, cp) * again[f"again_{cp}"] for cp in REPEATED[2:])
            seconds = of.cp_communication + self.scales.recompute * repeated
        return float(seconds[0])

    def _cp_sizes_of_node(self) -> list[int]:
        """CP sizes above 1 that the model allows and whose ranks share a node."""
        most = max(1, self.device.devices_per_node // self.layout.tp_size)
        sizes = []
        for cp_size in range(2, most + 1):
            try:
                self.check_cp_size(cp_size)
            except ValueError:
                continue
            sizes.append(cp_size)
        return sizes

    @cached_property
    def _terms(self) -> MicroBatchTerms:
        return MicroBatchTerms(self.model, self.device, self.layout)

    def _scaled(self, level: Level, tokens: np.ndarray, squares: np.ndarray) -> PackSeconds:
        """tokens, squares: float64 [packs], of a rank."""
        terms, scales = self._terms.seconds(level, tokens, squares), self.scales
        again = np.zeros(len(tokens))
        for name in REPEATED:
            again += getattr(scales, name) * terms[f"again_{name}"]
        return PackSeconds(
            fixed=scales.fixed * terms["fixed"],
            linear=scales.linear * terms["linear"],
            attention=scales.attention * terms["attention"],
            recompute=scales.recompute * again,
            cp_communication=scales.cp_intra * terms["cp_intra"]
            + scales.cp_inter * terms["cp_inter"],
            tp_communication=scales.linear * terms["tp"],
            moe_communication=scales.linear * terms["moe"],
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def analytic(model: ModelShape, device: Device, layout: RunLayout) -> CostModel:
    """The cost model from first principles. Raises ValueError when the layout cannot be."""
    return CostModel(model, device, layout)


def fitted(profile: Profile) -> tuple[CostModel, FitReport]:
    """The cost model whose terms fit the profile's points best, and how well they do.

    Relative errors are minimised, factors on the analytic terms are 0 or more. Points without
    sequences' tokens and squares are left out. Raises ValueError when none is left, or when the
    profile names an unknown model or device.
    """
    model = analytic(find_model(profile.model), find_device(profile.device), profile.layout)
    points = [point for point in profile.points if point.squares is not None]
    if not points:
        raise ValueError(
            "the profile has no point with tokens and squares, so attention cannot be told from "
            "the rest; measure with packs of known lengths, or use analytic()"
        )
    rows = []
    for point in points:
        level = point.level
        try:
            model.check_cp_size(level.cp_size)
        except ValueError as error:
            raise ValueError(f"point of level {level}: {error}") from None
        tokens, squares = float(level.tokens_per_rank), float(point.squares or 0) / level.cp_size
        terms = model._terms.seconds(level, np.array([tokens]), np.array([squares]))
        terms["linear"] = terms["linear"] + terms.pop("tp") + terms.pop("moe")
        rows.append(terms)
    columns = {name: np.concatenate([terms[name] for terms in rows]) for name in rows[0]}
    seconds = np.array([point.seconds for point in points])
    report = fit_scales(columns, seconds, [str(point.level) for point in points])
    return replace(model, scales=Scales(**report.scales)), report
