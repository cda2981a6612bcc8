"""Seconds of one micro-batch on a rank and its slowest stage, term by term, from first principles.

Guarantees (asserted by tests/unit/test_cost_model.py): see cost_model.py, which adds up the terms.
All times grow with tokens of a rank, with squared lengths over CP, or not at all, so a term is a
rate times an amount.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hbp.hardware import Device
from megatron_hbp.level import Level
from megatron_hbp.model_shape import ModelShape
from megatron_hbp.run_layout import RunLayout, Stage, members_on_node, stages_of

ELEMENT_BYTES = 2  # bf16 on the wire
# FLOPs of flash attention's backward over its forward: five products instead of two.
ATTENTION_BACKWARD = 2.5
# Routed experts' products are small: experts of this hidden width reach half the efficiency of
# large products, wider ones width / (width + this). An assumption that meets published speeds of
# Mixtral 8x7B (14336) and Qwen3-30B-A3B (768), see docs/profile.md.
EXPERT_HALF_WIDTH = 512
# Of tensor-parallel communication, what products hide (--tp-comm-overlap); an assumption.
TP_OVERLAP = 0.5
# Terms whose forward is repeated by recomputed layers.
REPEATED = ("linear", "attention", "cp_intra", "cp_inter")


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors on the analytic terms, 1 without a fit. linear: also of TP and MoE communication."""

    fixed: float = 1.0
    linear: float = 1.0
    attention: float = 1.0
    recompute: float = 1.0
    cp_intra: float = 1.0
    cp_inter: float = 1.0


@dataclass(frozen=True)
class PackSeconds:
    """float64 [packs] each: seconds of each rank of a pack and its stage, forward and backward."""

    fixed: np.ndarray
    linear: np.ndarray
    attention: np.ndarray
    recompute: np.ndarray
    cp_communication: np.ndarray
    tp_communication: np.ndarray
    moe_communication: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """float64 [packs]"""
        return self.computation + self.communication

    @property
    def computation(self) -> np.ndarray:
        """float64 [packs]: all but communication; recompute counts as computation."""
        return self.fixed + self.linear + self.attention + self.recompute

    @property
    def communication(self) -> np.ndarray:
        """float64 [packs]"""
        return self.cp_communication + self.tp_communication + self.moe_communication


@dataclass(frozen=True)
class MicroBatchTerms:
    """Rates of `model` on `device` in `layout`."""

    model: ModelShape
    device: Device
    layout: RunLayout

    def seconds(
        self, level: Level, tokens: np.ndarray, squares: np.ndarray
    ) -> dict[str, np.ndarray]:
        """float64 [packs] each: fixed, linear, attention, cp_intra, cp_inter, tp, moe, and again_X.

        tokens, squares: float64 [packs], of a rank. again_X: the forward of X that the level's
        recomputed layers repeat; again_linear holds that of tp and moe, too.
        """
        return self._of_stage(self.slowest_stage(level), level, tokens, squares)

    def slowest_stage(self, level: Level) -> Stage:
        """The stage whose micro-batches of the level take longest.

        It is one for all packs of a level, so that their times stay linear in what they hold:
        the slowest with full packs of sequences half as long as the pack.
        """
        if level not in self._slowest:
            tokens = np.array([float(level.tokens_per_rank)])
            squares = tokens * level.pack_len / 2
            self._slowest[level] = max(
                self._unlike_stages,
                key=lambda stage: sum(
                    float(seconds[0])
                    for seconds in self._of_stage(stage, level, tokens, squares).values()
                ),
            )
        return self._slowest[level]

    @cached_property
    def _unlike_stages(self) -> tuple[Stage, ...]:
        """Of stages with the same layers the first."""
        found: dict[tuple, Stage] = {}
        for stage in stages_of(self.model, self.layout):
            key = (stage.dense_layers, stage.moe_layers, stage.chunk_layers, stage.has_logits)
            found.setdefault(key, stage)
        return tuple(found.values())

    @cached_property
    def _slowest(self) -> dict[Level, Stage]:
        return {}

    def _of_stage(
        self, stage: Stage, level: Level, tokens: np.ndarray, squares: np.ndarray
    ) -> dict[str, np.ndarray]:
        intra, inter = self._exchange(stage, level.cp_size)
        share = self._recomputed_share(stage, level)
        layers, logits = self._products(stage)
        linear = tokens * layers
        attention = squares * self._attention(stage)
        tp, moe = tokens * self._tensor_parallel(stage), tokens * self._experts(stage)
        return {
            "fixed": np.full(len(tokens), self.device.launch_seconds * stage.num_layers),
            "linear": 3 * (linear + tokens * logits),
            "attention": (1 + ATTENTION_BACKWARD) * attention,
            "cp_intra": 2 * tokens * intra,
            "cp_inter": 2 * tokens * inter,
            "tp": 2 * tp,
            "moe": 2 * moe,
            "again_linear": share * (linear + tp + moe),
            "again_attention": share * attention,
            "again_cp_intra": share * tokens * intra,
            "again_cp_inter": share * tokens * inter,
        }

    def _products(self, stage: Stage) -> tuple[float, float]:
        """Forward seconds per token of a rank: layers, output layer."""
        model = self.model
        speed = self.device.peak_flops * self.device.matmul_efficiency * self.layout.tp_size
        large = stage.num_layers * model.attention_matmul_flops_per_token()
        large += stage.dense_layers * model.dense_mlp_flops_per_token()
        large += stage.moe_layers * model.shared_flops_per_token()
        small = stage.moe_layers * model.expert_flops_per_token()
        logits = model.logit_flops_per_token() if stage.has_logits else 0.0
        if small:
            small *= 1 + EXPERT_HALF_WIDTH / model.moe_ffn_hidden_size
        return (large + small) / speed, logits / speed

    def _attention(self, stage: Stage) -> float:
        """Forward seconds per squared token of a rank."""
        share = stage.num_layers / self.model.num_layers
        speed = self.device.peak_flops * self.device.attention_efficiency * self.layout.tp_size
        return share * self.model.attention_flops_per_square() / speed

    def _tensor_parallel(self, stage: Stage) -> float:
        """Forward seconds per token of a rank.

        An all-gather and a reduce-scatter (or an all-reduce, the same bytes) around attention, and
        around the MLP or the shared experts.
        """
        tp = self.layout.tp_size
        blocks = stage.num_layers + stage.dense_layers
        if self.model.moe_shared_ffn_hidden_size:
            blocks += stage.moe_layers
        on_node = tp <= self.device.devices_per_node
        link = self.device.intra_node_bandwidth if on_node else self.device.inter_node_bandwidth
        sent = blocks * 2 * self.model.hidden_size * ELEMENT_BYTES * (tp - 1) / tp
        return (1 - TP_OVERLAP) * sent / link

    def _experts(self, stage: Stage) -> float:
        """Forward seconds per token of a rank: a copy for each expert goes out and comes back."""
        copies = self.model.moe_topk * self.model.hidden_size / self.layout.tp_size
        inside, between = self._sent(self.layout.ep_size, self.layout.expert_tp_size)
        return stage.moe_layers * 2 * copies * ELEMENT_BYTES * (inside + between)

    def _exchange(self, stage: Stage, cp_size: int) -> tuple[float, float]:
        """Forward seconds of Ulysses per token of a rank: inside a node, between nodes."""
        values = self.model.exchanged_values_per_token(cp_size, self.layout.tp_size)
        sent = stage.num_layers * values * ELEMENT_BYTES
        inside, between = self._sent(cp_size, self.layout.tp_size)
        return sent * inside, sent * between

    def _sent(self, size: int, stride: int) -> tuple[float, float]:
        """Seconds of a byte spread evenly over a group of GPUs: inside a node, between nodes."""
        near = members_on_node(size, stride, self.device.devices_per_node)
        return (
            (near - 1) / size / self.device.intra_node_bandwidth,
            (size - near) / size / self.device.inter_node_bandwidth,
        )

    def _recomputed_share(self, stage: Stage, level: Level) -> float:
        """Of the stage's layers, those that are recomputed."""
        again = stage.recomputed(level.recompute_layers, self.layout.num_chunks)
        return again / max(1, stage.num_layers)
