"""Whether every stage fits in its GPUs at every level, and what would make it fit.

Guarantees (asserted by tests/unit/test_check_memory.py):
- one row for each stage and level; a sentence for each level that does not fit, about its fullest
  stage;
- a way out that a sentence gives fits by the same model.
Bytes are those of memory_model.py; parameters are the built model's where they are known.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_hbp.hardware import Device
from megatron_hbp.level import Level
from megatron_hbp.memory_model import Memory, stage_memory, stage_parameters
from megatron_hbp.model_shape import ModelShape
from megatron_hbp.run_layout import RunLayout, check_cp_size, check_layout, stages_of

# What the shape leaves out, norms inside attention and biases: at most this share of a stage's
# parameters, or vectors of each layer where the model is tiny.
_LEFT_OUT = 1e-3
_VECTORS = 8
_GIB = 2**30
# A rank's parameters: all but routed experts, and routed experts.
Parameters = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """A GPU of a stage when all its micro-batches in flight are of the level. Bytes."""

    stage: int
    level: Level
    memory: Memory
    device_bytes: int

    @property
    def total(self) -> float:
        return self.memory.total

    @property
    def fits(self) -> bool:
        return self.total <= self.device_bytes


def chunk_layers_of(stages: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """RunLayout.chunk_layers from the layers of each stage's virtual stages."""
    return tuple(layers for chunks in zip(*stages, strict=True) for layers in chunks)


def stage_memories(
    model: ModelShape,
    device: Device,
    layout: RunLayout,
    levels: Sequence[Level],
    built: Sequence[Parameters] = (),
) -> tuple[StageMemory, ...]:
    """A row for each stage and level, stages first.

    built: parameters on a GPU of each stage as the host built it (empty: counted by the shape).
    Raises ValueError when the model cannot run on the layout, or a level's CP size not with either.
    """
    check_layout(model, layout)
    for level in levels:
        check_cp_size(model, layout, level.cp_size)
    return tuple(
        StageMemory(
            stage=stage.index,
            level=level,
            memory=stage_memory(
                model,
                layout,
                stage,
                tokens=level.tokens_per_rank,
                cp_size=level.cp_size,
                recompute_layers=level.recompute_layers,
                parameters=built[stage.index] if built else None,
            ),
            device_bytes=device.memory_bytes,
        )
        for stage in stages_of(model, layout)
        for level in levels
    )


def memory_problems(
    model: ModelShape,
    device: Device,
    layout: RunLayout,
    levels: Sequence[Level],
    built: Sequence[Parameters] = (),
) -> list[str]:
    """A sentence for each level that does not fit: how much is missing, of what, a way out."""
    sentences = []
    for level in levels:
        fullest = max(
            stage_memories(model, device, layout, [level], built), key=lambda row: row.total
        )
        if fullest.fits:
            continue
        parts = {
            part.name: getattr(fullest.memory, part.name) / _GIB
            for part in fields(Memory)
            if getattr(fullest.memory, part.name)
        }
        listed = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items())
        sentences.append(
            f"level {level} needs {fullest.total / _GIB:.1f} GiB on a GPU of stage "
            f"{fullest.stage} ({listed}), {device.name} has {device.memory_bytes / _GIB:.1f} GiB; "
            f"{_way_out(model, device, layout, level, built)}"
        )
    return sentences


def parameter_problems(
    model: ModelShape, layout: RunLayout, built: Sequence[Parameters]
) -> list[str]:
    """A sentence for each stage whose built parameters are not those that the shape counts.

    Times and memory of another model would then be predicted. built: see stage_memories().
    """
    sentences = []
    for stage, found in zip(stages_of(model, layout), built, strict=True):
        counted = stage_parameters(model, layout, stage)
        vector = (
            model.hidden_size + model.ffn_hidden_size + model.num_attention_heads * model.qk_dim
        )
        left_out = max(_LEFT_OUT * sum(found), stage.num_layers * _VECTORS * vector)
        if abs(sum(found) - sum(counted)) > left_out:
            sentences.append(
                f"stage {stage.index} has {sum(found):,} parameters on a GPU as built, the model "
                f"that times and memory are predicted for has {round(sum(counted)):,}; a flag "
                "changes the model that the prediction does not know, so trust neither"
            )
    return sentences


def not_predicted(arguments: Mapping[str, Any]) -> list[str]:
    """What the run's flags change that memory_model.py does not know, in words.

    arguments: the host's, by attribute name; those that are missing are taken to be off.
    """
    notes = []
    if not arguments.get("bf16"):
        notes.append(
            "memory is predicted for bf16 weights and activations: without --bf16 those of fp32 "
            "take twice as much"
        )
    for attribute, flag, effect in (
        ("use_precision_aware_optimizer", "--use-precision-aware-optimizer", "less"),
        ("optimizer_cpu_offload", "--optimizer-cpu-offload", "less"),
        ("cpu_offloading_num_layers", "--cpu-offloading-num-layers", "less"),
        ("fine_grained_activation_offloading", "--fine-grained-activation-offloading", "less"),
        ("grad_reduce_in_bf16", "--grad-reduce-in-bf16", "less"),
        ("fp8", "--fp8-format", "other (FP8 copies of weights, FP8 inputs of products)"),
        ("fp4", "--fp4-format", "other (FP4 copies of weights)"),
        ("nccl_ub", "--nccl-ub", "more (registered buffers)"),
    ):
        if arguments.get(attribute):
            notes.append(f"memory is predicted without {flag}, which takes {effect}")
    if arguments.get("recompute_granularity") == "selective":
        notes.append(
            "memory is predicted without --recompute-granularity selective, which takes less"
        )
    if arguments.get("optimizer") not in (None, "adam"):
        notes.append(
            f"memory is predicted for --optimizer adam; {arguments['optimizer']} keeps other states"
        )
    return notes


def _way_out(
    model: ModelShape,
    device: Device,
    layout: RunLayout,
    level: Level,
    built: Sequence[Parameters],
) -> str:
    """The first that fits: more recompute, fewer tokens per rank, another layout."""

    def fits(one: Level, other: RunLayout = layout) -> bool:
        counts = built if other is layout else ()
        return all(row.fits for row in stage_memories(model, device, other, [one], counts))

    def holding(pack_len: int, cp_size: int) -> Level:
        return Level(pack_len, cp_size, "full")

    ways = []
    more = next((one for one in _more_recompute(model, layout, level) if fits(one)), None)
    if more is not None:
        ways.append(f"recompute more in that level: --hbp-level {more}")
    else:
        tokens = next(
            (
                size
                for size in _smaller(level.tokens_per_rank)
                if fits(holding(size * level.cp_size, level.cp_size))
            ),
            None,
        )
        if tokens is not None:
            pack_len = tokens * level.cp_size
            ways.append(
                f"use --seq-length {tokens} (this level becomes {pack_len}:{level.cp_size}:full, "
                "the others S x CP, too)"
            )
        ways += [
            f"use {flags} (with every layer recomputed)"
            for flags, other in _other_layouts(model, layout, level)
            if fits(holding(level.pack_len, level.cp_size), other)
        ][:2]
    if not ways:
        return (
            "no more recompute, fewer tokens or twice as much of one kind of parallelism makes it "
            "fit; use more GPUs for a replica (--pipeline-model-parallel-size, "
            "--tensor-model-parallel-size, --expert-model-parallel-size)"
        )
    return ", or ".join(ways)


def _more_recompute(model: ModelShape, layout: RunLayout, level: Level) -> Iterator[Level]:
    """The level with ever more recomputed layers, as many in each chunk."""
    if level.recompute_layers == "full":
        return
    chunks = layout.num_chunks
    for each in range(level.recompute_layers // chunks + 1, -(-model.num_layers // chunks)):
        yield replace(level, recompute_layers=each * chunks)
    yield replace(level, recompute_layers="full")


def _smaller(tokens: int) -> Iterator[int]:
    """Token budgets below `tokens`, in eighths of it; multiples of 128 where large."""
    for share in (7, 6, 5, 4, 3, 2, 1):
        size = tokens * share // 8
        size = size // 128 * 128 or size
        if 0 < size < tokens:
            yield size


def _other_layouts(
    model: ModelShape, layout: RunLayout, level: Level
) -> Iterator[tuple[str, RunLayout]]:
    """Layouts on the same GPUs that the model can run on, cheapest change first, with flags."""
    changes: list[tuple[str, dict[str, Any]]] = []
    if not layout.distributed_optimizer:
        changes.append(("--use-distributed-optimizer", {"distributed_optimizer": True}))
    if model.num_experts:
        ep_size = 2 * layout.ep_size
        changes.append((f"--expert-model-parallel-size {ep_size}", {"ep_size": ep_size}))
    # half the ranks, so twice the micro-batches at the same --global-batch-size
    half = {
        "num_ranks": layout.num_ranks // 2,
        "num_microbatches": 2 * layout.num_microbatches,
    }
    if layout.num_ranks % 2 == 0:
        stages, tp_size = 2 * layout.num_stages, 2 * layout.tp_size
        changes += [
            (
                f"--pipeline-model-parallel-size {stages}",
                {"num_stages": stages, "chunk_layers": ()} | half,
            ),
            (
                f"--tensor-model-parallel-size {tp_size} --sequence-parallel",
                {"tp_size": tp_size, "sequence_parallel": True} | half,
            ),
        ]
    for flags, change in changes:
        try:
            other = replace(layout, **change)
            check_layout(model, other)
            check_cp_size(model, other, level.cp_size)
        except ValueError:
            continue
        yield flags, other
