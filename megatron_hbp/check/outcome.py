"""What `hbp check` concludes from the facts of a start: reasons against it, warnings, figures.

Guarantees (asserted by tests/unit/test_check_outcome.py):
- a run that the host or a check of ours would end has a problem, and so has one whose memory,
  lockstep or parameter counts are wrong; what only costs time or could not be looked at is a
  warning or a note;
- what cannot be worked out is None or empty, never guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_hbp.check.collectives import ModelTraffic, StageWork, not_followed, stage_work
from megatron_hbp.check.facts import Facts, StageFacts
from megatron_hbp.check.lockstep import Lockstep, lockstep
from megatron_hbp.check.memory import (
    StageMemory,
    chunk_layers_of,
    memory_problems,
    not_predicted,
    parameter_problems,
    stage_memories,
)
from megatron_hbp.check.nodes import GroupNodes, group_nodes, node_warnings
from megatron_hbp.check.rank_layout import RankLayout
from megatron_hbp.check.sizes import CheckpointSizes, checkpoint_sizes, corpus_bytes
from megatron_hbp.cost_model import analytic
from megatron_hbp.hardware import Device
from megatron_hbp.level import Level
from megatron_hbp.model_arguments import model_of
from megatron_hbp.model_shape import ModelShape
from megatron_hbp.plan import Plan
from megatron_hbp.recipe import Recipe
from megatron_hbp.run_layout import RunLayout
from megatron_hbp.simulate import simulate
from megatron_hbp.timeline import Timeline

# Of a published count, how far the built model may be from it. Counts of a token are published to
# two digits, and some leave the input embedding out.
_TOTALS_AGREE, _ACTIVE_AGREE = 0.005, 0.025


@dataclass(kw_only=True)
class Outcome:
    """problems: why the run would fail, or is not what it should be. warnings: what costs time.
    notes: what could not be looked at, or is only assumed.

    parameters, active_parameters: of the whole model as built, None when it cannot be.
    active_without_embedding: as some cards count, without the input embedding.
    """

    recipe: Recipe
    device: Device
    facts: Facts
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    model: ModelShape | None = None
    layout: RunLayout | None = None
    parameters: int | None = None
    active_parameters: int | None = None
    active_without_embedding: int | None = None
    plan: Plan | None = None
    memories: tuple[StageMemory, ...] = ()
    ranks: RankLayout | None = None
    works: tuple[StageWork, ...] = ()
    traffic: ModelTraffic | None = None
    lockstep: Lockstep | None = None
    nodes: tuple[GroupNodes, ...] = ()
    checkpoints: CheckpointSizes | None = None
    corpus_bytes: int | None = None
    timeline: Timeline | None = None

    @property
    def fits(self) -> bool:
        return not self.problems


def conclude(recipe: Recipe, device: Device, words: Sequence[str], facts: Facts) -> Outcome:
    """words: the run's command line."""
    found = Outcome(
        recipe=recipe,
        device=device,
        facts=facts,
        problems=list(facts.problems),
        notes=list(facts.notes),
    )
    if facts.plan is not None:
        found.plan = Plan.load(Path(facts.plan))
    if not facts.arguments or not facts.stages:
        return found
    _count(found)
    _shape(found, words)
    _look_at_plan(found)
    return found


def _count(found: Outcome) -> None:
    """Parameters as built, against the published ones."""
    arguments, stages, recipe = found.facts.arguments, found.facts.stages, found.recipe
    dense = sum(stage.unique_dense for stage in stages)
    experts = sum(stage.unique_experts for stage in stages)
    found.parameters = dense + experts
    of_a_token = arguments["moe_router_topk"] / arguments["num_experts"] if experts else 0
    found.active_parameters = dense + round(experts * of_a_token)
    embedding = arguments["padded_vocab_size"] * arguments["hidden_size"]
    found.active_without_embedding = found.active_parameters - embedding
    for what, counts, published, agree in (
        ("parameters", [found.parameters], recipe.parameters, _TOTALS_AGREE),
        (
            "active parameters",
            [found.active_parameters, found.active_without_embedding],
            recipe.active_parameters,
            _ACTIVE_AGREE,
        ),
    ):
        if published is None:
            continue
        if all(abs(counted - published) > agree * published for counted in counts):
            found.problems.append(
                f"the model as built has {counts[0] / 1e9:.2f} B {what}, published are "
                f"{published / 1e9:.2f} B ({recipe.source or recipe.name}); a flag of the model is "
                "wrong, or [published] is"
            )


def _shape(found: Outcome, words: Sequence[str]) -> None:
    """The model and layout that time and memory are predicted for; memory."""
    arguments, stages = found.facts.arguments, found.facts.stages
    tp_size = arguments["tensor_model_parallel_size"]
    num_ranks = arguments["data_parallel_size"]
    chunks = [
        [d + m for d, m in zip(stage.chunk_dense_layers, stage.chunk_moe_layers, strict=True)]
        for stage in stages
    ]
    try:
        found.model = model_of(found.recipe.name, words, vocab_rows=arguments["padded_vocab_size"])
        found.layout = RunLayout(
            num_ranks=num_ranks,
            num_microbatches=arguments["global_batch_size"] // num_ranks,
            tp_size=tp_size,
            num_stages=len(stages),
            num_virtual_stages=len(chunks[0]),
            ep_size=arguments["expert_model_parallel_size"],
            expert_tp_size=_expert_tp(arguments) if arguments["num_experts"] else 1,
            sequence_parallel=arguments["sequence_parallel"] or tp_size == 1,
            distributed_optimizer=arguments["use_distributed_optimizer"],
            chunk_layers=chunk_layers_of(chunks),
        )
        levels = _levels(found)
        built = [(stage.dense_parameters, stage.expert_parameters) for stage in stages]
        found.memories = stage_memories(found.model, found.device, found.layout, levels, built)
        found.problems += memory_problems(found.model, found.device, found.layout, levels, built)
        found.problems += parameter_problems(found.model, found.layout, built)
    except ValueError as error:
        found.notes.append(f"time and memory are not predicted: {error}")
    found.notes += not_predicted(arguments)


def _look_at_plan(found: Outcome) -> None:
    """Groups, lockstep, steps, checkpoints and predicted time."""
    arguments, plan, stages = found.facts.arguments, found.plan, found.facts.stages
    ranks = found.ranks = RankLayout(
        world_size=found.recipe.gpus,
        tp_size=arguments["tensor_model_parallel_size"],
        num_stages=len(stages),
        num_virtual_stages=len(stages[0].chunk_moe_layers),
        ep_size=arguments["expert_model_parallel_size"],
        expert_tp_size=_expert_tp(arguments),
        sequence_parallel=arguments["sequence_parallel"],
        stages_last=not arguments["use_tp_pp_dp_mapping"],
        overlap_transfers=arguments["overlap_p2p_comm"],
        groups=found.facts.groups,
    )
    levels = _levels(found)
    cp_sizes = tuple(level.cp_size for level in levels)
    found.nodes = tuple(group_nodes(ranks, found.recipe.gpus_per_node, cp_sizes))
    found.warnings += node_warnings(ranks, found.recipe.gpus_per_node, cp_sizes)
    if plan is None:
        return
    found.works, found.traffic = _works(found, levels), _traffic(arguments)
    found.lockstep = lockstep(plan, ranks, found.works, found.traffic)
    found.problems += found.lockstep.problems
    found.notes += not_followed(arguments)
    if arguments["microbatch_group_size_per_vp_stage"] not in (None, len(stages)):
        found.notes.append(
            "the order of work is that of groups of as many micro-batches as stages: lockstep and "
            "time are not those of --microbatch-group-size-per-virtual-pipeline-stage "
            f"{arguments['microbatch_group_size_per_vp_stage']}"
        )
    if plan.num_microbatches < len(stages):
        enough = ranks.num_ranks * len(stages)
        found.warnings.append(
            f"{plan.num_microbatches} micro-batches a step for {len(stages)} pipeline stages: most "
            f"stages wait most of the time; use --global-batch-size {enough} or more"
        )
    found.corpus_bytes = corpus_bytes(
        num_sequences=len(plan.seq_lens),
        num_tokens=plan.tokens_in,
        vocab_size=arguments["padded_vocab_size"],
    )
    if arguments["train_iters"] is not None:
        found.checkpoints = checkpoint_sizes(
            arguments,
            parameters=found.parameters or 0,
            gpus=found.recipe.gpus,
            first=found.facts.steps_done,
            last=arguments["train_iters"],
        )
    if found.model is not None and found.layout is not None and found.fits:
        try:
            found.timeline = simulate(plan, analytic(found.model, found.device, found.layout))
        except ValueError as error:
            found.notes.append(f"time is not predicted: {error}")


def _levels(found: Outcome) -> tuple[Level, ...]:
    """The plan's, else those of the flags."""
    if found.plan is not None:
        return found.plan.levels
    return tuple(Level.parse(text) for text in found.facts.arguments["hbp_level"])


def _works(found: Outcome, levels: Sequence[Level]) -> tuple[StageWork, ...]:
    stages: list[StageFacts] = found.facts.stages
    return tuple(
        stage_work(
            levels,
            num_chunks=len(stages) * len(stage.chunk_moe_layers),
            dense_layers=stage.chunk_dense_layers,
            moe_layers=stage.chunk_moe_layers,
            by_flags=_recomputed_by_flags(found.facts.arguments),
        )
        for stage in stages
    )


def _recomputed_by_flags(arguments: dict[str, Any]) -> int | Literal["full"]:
    """Layers of each chunk, in levels without a setting of their own."""
    if arguments["recompute_granularity"] != "full":
        return 0
    if arguments["recompute_method"] == "uniform":
        return "full"
    return arguments["recompute_num_layers"]


def _traffic(arguments: dict[str, Any]) -> ModelTraffic:
    balancing = arguments["moe_router_load_balancing_type"]
    return ModelTraffic(
        latent_attention=arguments["multi_latent_attention"],
        q_lora=arguments["q_lora_rank"] is not None,
        shared_experts=bool(arguments["moe_shared_expert_intermediate_size"]),
        aux_loss="aux_loss" in ([balancing] if isinstance(balancing, str) else balancing),
        dispatcher=arguments["moe_token_dispatcher_type"],
        transformer_engine=arguments["transformer_impl"] == "transformer_engine",
    )


def _expert_tp(arguments: dict[str, Any]) -> int:
    return arguments["expert_tensor_parallel_size"] or arguments["tensor_model_parallel_size"]
