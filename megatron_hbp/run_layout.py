"""How a run spreads a model over GPUs: pipeline stages, their layers, and who sits on which node.

Guarantees (asserted by tests/unit/test_cost_model.py and test_chunk_layers.py):
- a layout that the model cannot run on is refused with the rule and a way out;
- every layer is on exactly one stage.
GPUs are ordered as Megatron orders them: tensor parallelism (TP) first, then the ranks, then the
stages. Layers go to stages x virtual stages chunks, chunk c in the order of the layers to stage
c mod stages: as many as the layout says, or as evenly as can be, earlier chunks first.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

from megatron_hbp.model_shape import ModelShape

# More than any cluster has; larger numbers are slips of the finger that would run for ever.
MOST = 2**20


@dataclass(frozen=True, kw_only=True)
class RunLayout:
    """num_ranks: ranks, each a TP x stages replica of the model. num_microbatches: of a step.

    ep_size: expert parallelism, over GPUs of a stage; expert_tp_size: TP inside an expert
    (Megatron's --expert-tensor-parallel-size). chunk_layers: layers of each pipeline chunk, in the
    order of the layers; empty for as even as can be. Raises ValueError for counts below 1 or above
    MOST, and unless chunk_layers has one number a chunk.
    """

    num_ranks: int
    num_microbatches: int = 1
    tp_size: int = 1
    num_stages: int = 1
    num_virtual_stages: int = 1
    ep_size: int = 1
    expert_tp_size: int = 1
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    chunk_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "chunk_layers":
                continue
            value = getattr(self, field.name)
            kind = bool if field.type is bool else int
            if type(value) is not kind or (kind is int and value < 1):
                wanted = "true or false" if kind is bool else "a whole number of 1 or more"
                raise ValueError(f"layout: {field.name} is {value!r}; give {wanted}")
            if value > MOST:
                raise ValueError(f"layout: {field.name} is {value}; give at most {MOST}")
        if self.num_virtual_stages > 1 and self.num_stages == 1:
            raise ValueError("layout: virtual stages need num_stages above 1; use 1 virtual stage")
        self._check_chunk_layers()

    def _check_chunk_layers(self) -> None:
        given = self.chunk_layers
        whole = isinstance(given, tuple) and all(type(layers) is int for layers in given)
        if not whole or any(not 0 <= layers <= MOST for layers in given):
            raise ValueError(
                f"layout: chunk_layers is {given!r}; give whole numbers of 0 or more, such as 8,8,7"
            )
        if given and len(given) != self.num_chunks:
            raise ValueError(
                f"layout: chunk_layers has {len(given)} numbers for {self.num_stages} stages x "
                f"{self.num_virtual_stages} virtual stages; give {self.num_chunks}"
            )

    @property
    def world_size(self) -> int:
        """GPUs of the run."""
        return self.num_ranks * self.tp_size * self.num_stages

    @property
    def num_chunks(self) -> int:
        """Pipeline chunks that the layers are spread over."""
        return self.num_stages * self.num_virtual_stages


@dataclass(frozen=True)
class Stage:
    """Layers of one pipeline stage; chunk_layers: of each of its virtual stages."""

    index: int
    dense_layers: int
    moe_layers: int
    chunk_layers: tuple[int, ...]
    has_embedding: bool
    has_logits: bool

    @property
    def num_layers(self) -> int:
        return self.dense_layers + self.moe_layers

    def recomputed(self, whole_model_layers: int | Literal["full"], num_chunks: int) -> int:
        """Layers of the stage that are recomputed: the same number in every chunk, rounded up."""
        if whole_model_layers == "full":
            return self.num_layers
        each = -(-whole_model_layers // num_chunks)
        return sum(min(each, layers) for layers in self.chunk_layers)


def stages_of(model: ModelShape, layout: RunLayout) -> tuple[Stage, ...]:
    """The stages, first to last."""
    base, extra = divmod(model.num_layers, layout.num_chunks)
    even = [base + (chunk < extra) for chunk in range(layout.num_chunks)]
    sizes = list(layout.chunk_layers) or even
    starts = [sum(sizes[:chunk]) for chunk in range(layout.num_chunks)]
    dense = model.num_dense_layers
    stages = []
    for index in range(layout.num_stages):
        mine = range(index, layout.num_chunks, layout.num_stages)
        num_dense = sum(min(max(dense - starts[chunk], 0), sizes[chunk]) for chunk in mine)
        layers = tuple(sizes[chunk] for chunk in mine)
        stages.append(
            Stage(
                index=index,
                dense_layers=num_dense,
                moe_layers=sum(layers) - num_dense,
                chunk_layers=layers,
                has_embedding=index == 0,
                has_logits=index == layout.num_stages - 1,
            )
        )
    return tuple(stages)


def check_layout(model: ModelShape, layout: RunLayout) -> tuple[str, ...]:
    """Raises ValueError when the model cannot run on the layout; returns what is unusual."""
    where = f"model {model.name!r}"
    heads, kv_heads, tp = model.num_attention_heads, model.num_query_groups, layout.tp_size
    if heads % tp:
        raise ValueError(
            f"{where}: TP {tp} does not divide the {heads} attention heads; use a TP size that does"
        )
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(
            f"{where}: TP {tp} and the {kv_heads} key/value heads: neither divides the other; use "
            "another TP size"
        )
    if layout.num_chunks > model.num_layers:
        raise ValueError(
            f"{where}: {layout.num_stages} stages x {layout.num_virtual_stages} virtual stages for "
            f"{model.num_layers} layers; use at most as many as layers"
        )
    if layout.num_virtual_stages > 1 and layout.num_microbatches % layout.num_stages:
        raise ValueError(
            f"layout: {layout.num_microbatches} micro-batches are no multiple of "
            f"{layout.num_stages} stages, which virtual stages need; use "
            f"{-(-layout.num_microbatches // layout.num_stages) * layout.num_stages}"
        )
    _check_experts(model, layout, where)
    given = layout.chunk_layers
    if given and sum(given) != model.num_layers:
        raise ValueError(
            f"{where}: chunk_layers {','.join(map(str, given))} add up to {sum(given)}, the model "
            f"has {model.num_layers} layers; make them agree"
        )
    if not given and model.num_layers % layout.num_chunks:
        return (
            f"{model.num_layers} layers on {layout.num_chunks} pipeline chunks: the first "
            f"{model.num_layers % layout.num_chunks} hold one more; Megatron needs "
            "--pipeline-model-parallel-layout or --decoder-first/last-pipeline-num-layers; tell "
            "hbp select and simulate what those give with --chunk-layers",
        )
    return ()


def _check_experts(model: ModelShape, layout: RunLayout, where: str) -> None:
    if model.num_experts == 0:
        if layout.ep_size > 1 or layout.expert_tp_size > 1:
            raise ValueError(
                f"{where} has no experts, but EP is {layout.ep_size} with expert TP "
                f"{layout.expert_tp_size}; use 1 for both"
            )
        return
    if model.num_experts % layout.ep_size:
        raise ValueError(
            f"{where}: EP {layout.ep_size} does not divide the {model.num_experts} experts; use an "
            "EP size that does"
        )
    gpus = layout.num_ranks * layout.tp_size
    if gpus % (layout.ep_size * layout.expert_tp_size):
        raise ValueError(
            f"{where}: EP {layout.ep_size} x expert TP {layout.expert_tp_size} does not divide the "
            f"{gpus} GPUs of a stage (ranks x TP); use sizes that do"
        )
    if layout.tp_size > 1 and not layout.sequence_parallel:
        raise ValueError(
            f"{where}: experts with TP {layout.tp_size} need sequence parallelism in Megatron; "
            "switch it on, or use TP 1"
        )


def check_cp_size(model: ModelShape, layout: RunLayout, cp_size: int) -> None:
    """Raises ValueError unless Ulysses can split the model's heads over cp_size ranks.

    CP divides the ranks and the query heads of a tensor-parallel rank; its key/value heads divide
    CP or are divided by it (fewer heads than CP ranks are repeated).
    """
    heads = model.num_attention_heads // layout.tp_size
    kv_heads = max(1, model.num_query_groups // layout.tp_size)
    where = f"model {model.name!r} with TP {layout.tp_size}"
    if heads % cp_size:
        raise ValueError(
            f"{where}: CP size {cp_size} does not divide the {heads} attention heads of a "
            "tensor-parallel rank; use a CP size that does, or less tensor parallelism"
        )
    if kv_heads % cp_size and cp_size % kv_heads:
        raise ValueError(
            f"{where}: CP size {cp_size} and the {kv_heads} key/value heads of a tensor-parallel "
            "rank: neither divides the other; use another CP size"
        )
    if layout.num_ranks % cp_size:
        raise ValueError(
            f"CP size {cp_size} does not divide the {layout.num_ranks} ranks; use one that does"
        )


def members_on_node(group_size: int, stride: int, devices_per_node: int) -> int:
    """Members of a group of GPUs, `stride` apart, on one node, for the one with fewest on its own.

    Groups lie one after another, so they cut nodes at multiples of a common divisor.
    """
    return math.gcd(group_size, max(1, devices_per_node // stride))
