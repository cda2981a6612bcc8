"""The collectives of one forward or backward of a model chunk, and of the end of a step, in order.

Guarantees (asserted by tests/distributed/test_lockstep.py against recorded runs, every rank):
- for local layers (--transformer-impl local) the list is what the host issues, one by one: GQA and
  MLA, dense and MoE layers, the dispatchers alltoall and allgather, with and without sequence
  parallelism, EP, CP and recompute.
By the sources alone (tests/unit/test_collectives.py), not recorded: Transformer Engine's layers,
expert TP above 1 and the dispatcher flex, whose two exchanges are no collectives of
torch.distributed. There kernels may overlap or fuse what is listed; what lockstep needs, that the
list depends on nothing but stage, chunk, level and direction, is the same. Not followed, so that
there the list is not the host's, which `not_followed` says: selective recompute, uniform recompute
of several layers at once, and dense layers behind MoE layers. Left out, because the same on all
ranks of a stage whatever the plan: start-up, evaluation, checkpoints, logs, how gradients are cut
into buckets, the sum of tied embeddings' gradients over first and last stage, experts' biases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron_hbp.check.rank_layout import RankLayout
from megatron_hbp.level import Level
from megatron_hbp.pipeline import Work

_DISPATCHERS = ("alltoall", "allgather", "flex")


class Collective(NamedTuple):
    """kind: "cp" or one of rank_layout.GROUP_KINDS. op: as torch.distributed calls it."""

    kind: str
    op: str


@dataclass(frozen=True, kw_only=True)
class ModelTraffic:
    """What of a model's flags decides which collectives a layer needs.

    transformer_engine: layers are its own, not local ones. latent_attention: MLA, with q_lora where
    queries are compressed, too. aux_loss: MoE balanced by an auxiliary loss. dispatcher:
    --moe-token-dispatcher-type. Raises ValueError for one that the host does not have.
    """

    transformer_engine: bool = False

    latent_attention: bool = False
    q_lora: bool = False
    shared_experts: bool = False
    aux_loss: bool = False
    dispatcher: str = "alltoall"

    def __post_init__(self) -> None:
        if self.dispatcher not in _DISPATCHERS:
            raise ValueError(
                f"--moe-token-dispatcher-type {self.dispatcher}: use one of "
                f"{', '.join(_DISPATCHERS)}"
            )


@dataclass(frozen=True, kw_only=True)
class ChunkWork:
    """Layers of one model chunk, dense before MoE; recomputed: how many of them at each level."""

    dense_layers: int
    moe_layers: int
    recomputed: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return self.dense_layers + self.moe_layers


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """The chunks of a pipeline stage, in order of virtual stages. Index 0 holds the embedding when
    the stage is the first, the last one the logits when it is the last.
    """

    chunks: tuple[ChunkWork, ...]


def not_followed(arguments: Mapping[str, Any]) -> list[str]:
    """Of the host's arguments, those under which a rank issues other collectives than listed.

    All members of a group do so alike: what lockstep concludes stays true.
    """
    found = []
    if arguments["recompute_granularity"] == "selective":
        found.append("--recompute-granularity selective, which does a part of a layer again")
    layers = arguments["recompute_num_layers"] or 1
    if arguments["recompute_method"] == "uniform" and layers > 1:
        found.append(f"--recompute-method uniform with {layers} layers at once")
    pattern = arguments["moe_layer_freq"]
    kinds = [0, 1] if pattern == 1 else [1, 0] if isinstance(pattern, int) else pattern
    if arguments["num_experts"] and sorted(kinds) != list(kinds):
        found.append("--moe-layer-freq with dense layers behind MoE layers")
    return [
        f"the collectives of a rank are listed and counted as if there were no {what}"
        for what in found
    ]


def stage_work(
    levels: Sequence[Level],
    *,
    num_chunks: int,
    dense_layers: Sequence[int],
    moe_layers: Sequence[int],
    by_flags: int | Literal["full"] = 0,
) -> StageWork:
    """One stage from the layers of each of its chunks.

    num_chunks: stages x virtual stages; a level's recompute layers are spread over them, rounded
    up. by_flags: layers of each chunk that --recompute-granularity full recomputes in levels
    without a setting of their own.
    """
    chunks = []
    for dense, moe in zip(dense_layers, moe_layers, strict=True):
        recomputed = []
        for level in levels:
            wanted = level.recompute_layers
            if wanted == 0:
                each = by_flags
            else:
                each = wanted if wanted == "full" else -(-wanted // num_chunks)
            recomputed.append(dense + moe if each == "full" else min(each, dense + moe))
        chunks.append(ChunkWork(dense_layers=dense, moe_layers=moe, recomputed=tuple(recomputed)))
    return StageWork(chunks=tuple(chunks))


@dataclass(frozen=True)
class Traffic:
    """Lists collectives of a run: a layout and a model."""

    layout: RankLayout
    model: ModelTraffic

    def of_work(self, stage: StageWork, work: Work, level: int, cp_size: int) -> list[Collective]:
        """A chunk's forward or backward in a micro-batch of a level."""
        chunk = stage.chunks[work.chunk]
        last_place = self.layout.num_stages - 1, self.layout.num_virtual_stages - 1
        first, last = (work.stage, work.chunk) == (0, 0), (work.stage, work.chunk) == last_place
        issue = self._forward if work.forward else self._backward
        return issue(chunk, level, cp_size, first=first, last=last)

    def _forward(
        self, chunk: ChunkWork, level: int, cp_size: int, *, first: bool, last: bool
    ) -> list[Collective]:
        """first, last: the chunk holds the embedding, the logits."""
        found = self._row_forward() if first else []
        for layer in range(chunk.num_layers):
            kept = layer >= chunk.recomputed[level]
            found += self._layer_forward(layer >= chunk.dense_layers, cp_size, with_graph=kept)
        if last:
            found += self._column_forward()
            # vocabulary-parallel cross entropy: the maximum, the target's logit, the sum
            found += self._tp("all_reduce") * 3
        return found

    def _backward(
        self, chunk: ChunkWork, level: int, cp_size: int, *, first: bool, last: bool
    ) -> list[Collective]:
        """With the forwards that are done again."""
        found = self._column_backward() if last else []
        recomputed = chunk.recomputed[level]
        for layer in reversed(range(recomputed, chunk.num_layers)):
            found += self._layer_backward(layer >= chunk.dense_layers, cp_size)
        for layer in reversed(range(recomputed)):
            moe = layer >= chunk.dense_layers
            found += self._layer_forward(moe, cp_size, with_graph=True)
            found += self._layer_backward(moe, cp_size)
        return found + (self._row_backward() if first else [])

    def step_end(self, stage: StageWork) -> list[Collective]:
        """After the last backward: gradients, token counts, norm. One of each kind, in order."""
        layout = self.layout
        has_experts = any(chunk.moe_layers for chunk in stage.chunks)
        found = [Collective("dp", "reduce gradients")]
        if has_experts:
            found.append(Collective("expert_dp", "reduce gradients"))
        if layout.tp_size > 1:
            found.append(Collective("tp", "reduce norm gradients"))
        if layout.num_stages > 1:
            found.append(Collective("pp", "broadcast token count"))
        return [*found, Collective("dp", "sum token count"), Collective("mp", "gradient norm")]

    def _tp(self, *ops: str) -> list[Collective]:
        return [Collective("tp", op) for op in ops] if self.layout.tp_size > 1 else []

    def _column_forward(self) -> list[Collective]:
        return self._tp("all_gather") if self.layout.sequence_parallel else []

    def _column_backward(self) -> list[Collective]:
        if self.layout.sequence_parallel:
            return self._tp("all_gather", "reduce_scatter")  # the input again, its gradient
        return self._tp("all_reduce")

    def _row_forward(self) -> list[Collective]:
        return self._tp("reduce_scatter" if self.layout.sequence_parallel else "all_reduce")

    def _row_backward(self) -> list[Collective]:
        return self._tp("all_gather") if self.layout.sequence_parallel else []

    def _layer_forward(self, moe: bool, cp_size: int, *, with_graph: bool) -> list[Collective]:
        found = self._projections_forward() + self._exchange(cp_size) + self._row_forward()
        if not moe:
            return found + self._column_forward() + self._row_forward()
        if self.model.shared_experts:
            found += self._column_forward() + self._row_forward()
        if self.model.aux_loss and with_graph:
            found += self._tp("all_reduce")
        return found + self._experts_forward()

    def _layer_backward(self, moe: bool, cp_size: int) -> list[Collective]:
        found = self._experts_backward() if moe else []
        if not moe or self.model.shared_experts:
            found += self._row_backward() + self._column_backward()
        found += self._row_backward() + self._exchange(cp_size)
        return found + self._projections_backward()

    def _exchange(self, cp_size: int) -> list[Collective]:
        """Ulysses: queries, keys and values together, and the output, in each direction."""
        return [Collective("cp", "all_to_all")] * 2 if cp_size > 1 else []

    def _projections_forward(self) -> list[Collective]:
        if not self.model.latent_attention:
            return self._column_forward()
        up = self._column_forward() * 2
        if self.model.transformer_engine:  # each rank projects its own tokens down
            return self._column_forward() + up
        down = self._column_forward() + self._tp("all_gather")  # over the latent's width
        return down * (2 if self.model.q_lora else 1) + up

    def _projections_backward(self) -> list[Collective]:
        if not self.model.latent_attention:
            return self._column_backward()
        up = self._column_backward() * 2
        if self.model.transformer_engine:
            return up + (self._tp("reduce_scatter") if self.layout.sequence_parallel else [])
        # every rank has the whole latent's gradient, or that of its own tokens
        down = self._row_backward() + self._column_backward()
        return up + down * (2 if self.model.q_lora else 1)

    def _experts_forward(self) -> list[Collective]:
        if self.layout.ep_size * self.layout.expert_tp_size == 1:
            return []
        if self.model.dispatcher == "flex":
            return [Collective("tp_ep", "dispatch"), Collective("tp_ep", "combine")]
        if self.model.dispatcher == "allgather":
            # the map of experts, probabilities, tokens, and back
            return [Collective("tp_ep", op) for op in (*["all_gather"] * 3, "reduce_scatter")]
        counts = [Collective("tp_ep", "all_gather")]
        tokens_and_probabilities = self._ep() * 2 + self._expert_tp("all_gather") * 2
        return counts + tokens_and_probabilities + self._expert_tp("reduce_scatter") + self._ep()

    def _experts_backward(self) -> list[Collective]:
        if self.layout.ep_size * self.layout.expert_tp_size == 1:
            return []
        if self.model.dispatcher == "flex":
            return [Collective("tp_ep", "combine"), Collective("tp_ep", "dispatch")]
        if self.model.dispatcher == "allgather":
            return [Collective("tp_ep", op) for op in ("all_gather", *["reduce_scatter"] * 2)]
        back = self._ep() + self._expert_tp("all_gather")
        return back + self._expert_tp("reduce_scatter") * 2 + self._ep() * 2

    def _ep(self) -> list[Collective]:
        return [Collective("ep", "all_to_all")] if self.layout.ep_size > 1 else []

    def _expert_tp(self, op: str) -> list[Collective]:
        return [Collective("expert_tp", op)] if self.layout.expert_tp_size > 1 else []
