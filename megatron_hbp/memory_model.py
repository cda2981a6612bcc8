"""Memory of a GPU: weights, gradients, optimizer, activations, logits, and what is always there.

Formulas: Megatron-LM's theoretical_memory_usage.py for weights and optimizer, Korthikanti et al.
(arXiv 2205.05198) for activations with sequence parallelism and for micro-batches in flight, both
written out per tensor so that MLA, MoE and gated MLPs are covered. Flash attention keeps no S x S
tensor. Selective recompute (Megatron's own flag for all levels) is not subtracted.

Guarantees (asserted by tests/unit/test_memory_model.py):
- more recompute never takes more memory; more tokens per rank never take less;
- more ranks never raise the optimizer shard.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_hbp.model_shape import ModelShape
from megatron_hbp.run_layout import RunLayout, Stage

WEIGHT_BYTES = 2  # bf16
GRADIENT_BYTES = 4  # Megatron accumulates bf16 gradients in fp32
OPTIMIZER_BYTES = 12  # fp32 weights and Adam's two moments
ACTIVATION_BYTES = 2  # bf16
# Logits of the output layer in bf16, their fp32 copy that becomes the softmax and the gradient
# (megatron/core/tensor_parallel/cross_entropy.py).
LOGIT_BYTES = 2 + 4
# Temporaries and fragmentation; theoretical_memory_usage.py adds the same 5 %.
ACTIVATION_OVERHEAD = 1.05
# CUDA context, NCCL buffers of all groups, cuBLAS workspaces; an assumption.
CONTEXT_BYTES = 3 * 2**30
# Tokens that the fullest GPU's experts get, over the mean; an assumption for balanced routing.
ROUTING_IMBALANCE = 1.1


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU; `other` is what is there without a model."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    other: float

    @property
    def total(self) -> float:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.other
        )


def stage_parameters(model: ModelShape, layout: RunLayout, stage: Stage) -> tuple[float, float]:
    """Parameters on one GPU of a stage: all but routed experts, and routed experts."""
    tp = layout.tp_size
    per_layer = (
        model.split_attention_parameters / tp
        + model.replicated_attention_parameters
        + 2 * model.hidden_size
    )
    moe = model.router_parameters + model.mlp_parameters(model.moe_shared_ffn_hidden_size) / tp
    dense = stage.num_layers * per_layer
    dense += stage.dense_layers * model.mlp_parameters(model.ffn_hidden_size) / tp
    dense += stage.moe_layers * moe
    if stage.has_embedding:
        dense += model.embedding_parameters / tp
    if stage.has_logits:
        dense += model.hidden_size
        if not (model.tied_embeddings and stage.has_embedding):
            dense += model.embedding_parameters / tp
    experts = stage.moe_layers * model.num_experts * model.expert_parameters
    return dense, experts / (layout.ep_size * layout.expert_tp_size)


def layer_activation_bytes(
    model: ModelShape, layout: RunLayout, *, moe: bool, cp_size: int
) -> float:
    """Bytes that one layer keeps for its backward, per token of a rank, on one GPU.

    Inputs and outputs of both norms; q, k, v and the output of attention (key/value heads repeated
    up to the CP size, the output in both layouts with CP); the latents of MLA; inner tensors of the
    MLP or of the experts, which also keep their own copies of the tokens sent to them.
    """
    tp = layout.tp_size
    full = 4 * model.hidden_size / (tp if layout.sequence_parallel else 1)
    heads = model.num_attention_heads
    kv_heads = max(model.num_query_groups, cp_size * tp)
    attention = heads * (model.qk_dim + model.v_dim) + kv_heads * (model.qk_dim + model.v_dim)
    if cp_size > 1:
        attention += heads * model.v_dim
    if model.kv_lora_rank is not None:
        attention += 2 * (model.q_lora_rank or 0) + 2 * model.kv_lora_rank
        attention += model.qk_rope_head_dim or 0
    inner = 3 if model.gated_mlp else 2
    if moe:
        routed = model.hidden_size + inner * model.moe_ffn_hidden_size
        mlp = inner * model.moe_shared_ffn_hidden_size
        mlp += ROUTING_IMBALANCE * model.moe_topk * routed
    else:
        mlp = inner * model.ffn_hidden_size
    return ACTIVATION_BYTES * (full + (attention + mlp) / tp)


def microbatches_in_flight(layout: RunLayout, stage: Stage) -> float:
    """Micro-batches whose activations a stage holds at most, in units of the whole stage.

    1F1B: the stages from this one on; interleaved: Megatron's warm-up chunks and one more
    (get_pp_rank_microbatches in megatron/core/pipeline_parallel/schedules.py).
    """
    behind = layout.num_stages - stage.index - 1
    virtual = layout.num_virtual_stages
    if virtual == 1:
        return float(min(layout.num_microbatches, behind + 1))
    chunks = 2 * behind + (virtual - 1) * layout.num_stages + 1
    return min(layout.num_microbatches * virtual, chunks) / virtual


def stage_memory(
    model: ModelShape,
    layout: RunLayout,
    stage: Stage,
    *,
    tokens: int,
    cp_size: int,
    recompute_layers: int | Literal["full"],
    parameters: tuple[float, float] | None = None,
) -> Memory:
    """Memory of a GPU of `stage`. tokens: S of a rank. recompute_layers: of the whole model.
    parameters: on the GPU, all but routed experts and those, where they are known better (None:
    stage_parameters()).

    Recomputed layers come first in a chunk and keep their input only. While one of them runs again
    the activations of the others of its micro-batch are gone, so the peak is the larger of the two
    moments.
    """
    dense, experts = parameters or stage_parameters(model, layout, stage)
    shards, expert_shards = 1, 1
    if layout.distributed_optimizer:
        shards = layout.num_ranks
        split = layout.ep_size * layout.expert_tp_size
        expert_shards = layout.num_ranks * layout.tp_size // split
    whole = tokens * ACTIVATION_OVERHEAD
    kinds = [(stage.dense_layers, False), (stage.moe_layers, True)]
    bytes_of = [
        (count, layer_activation_bytes(model, layout, moe=moe, cp_size=cp_size) * whole)
        for count, moe in kinds
        if count
    ]
    largest = max((per_layer for _, per_layer in bytes_of), default=0.0)
    mean = sum(count * per_layer for count, per_layer in bytes_of) / max(1, stage.num_layers)
    split_input = layout.tp_size if layout.sequence_parallel else 1
    kept = ACTIVATION_BYTES * model.hidden_size / split_input * whole
    again = stage.recomputed(recompute_layers, layout.num_chunks)
    held = (stage.num_layers - again) * mean + again * kept
    logits = 0.0
    if stage.has_logits:
        norm = 4 * model.hidden_size / split_input
        logits = tokens * (LOGIT_BYTES * model.vocab_size / layout.tp_size + norm)
    # the micro-batch that turns back: all that it holds and logits, or one layer run again
    running = again * kept + largest - kept if again else 0.0
    others = (microbatches_in_flight(layout, stage) - 1) * held
    return Memory(
        weights=WEIGHT_BYTES * (dense + experts),
        gradients=GRADIENT_BYTES * (dense + experts),
        optimizer=OPTIMIZER_BYTES * (dense / shards + experts / expert_shards),
        activations=others + max(held, running - logits),
        logits=logits,
        other=CONTEXT_BYTES,
    )
