"""The outcome of `hbp check` as plain text and as JSON.

Guarantees (asserted by tests/unit/test_check_report.py):
- every problem, warning and note of the outcome is in both, and so is every figure of the text in
  JSON.
"""

import dataclasses
from typing import Any

import numpy as np

from megatron_hbp.check.outcome import Outcome
from megatron_hbp.report.text import table

_GIB = 2**30
_DAY = 86400.0


def outcome_document(found: Outcome) -> dict[str, Any]:
    """Everything that was found, as JSON values; parts that could not be looked at are None."""
    recipe = found.recipe
    return {
        "fits": found.fits,
        "recipe": recipe.name,
        "title": recipe.title,
        "gpus": recipe.gpus,
        "gpus_per_node": recipe.gpus_per_node,
        "device": found.device.name,
        "device_gib": found.device.memory_bytes / _GIB,
        "transformer_engine": recipe.transformer_engine,
        "problems": found.problems,
        "warnings": found.warnings,
        "notes": found.notes,
        "layout": None if found.layout is None else dataclasses.asdict(found.layout),
        "parameters": found.parameters,
        "active_parameters": found.active_parameters,
        "active_without_embedding": found.active_without_embedding,
        "published_parameters": recipe.parameters,
        "published_active_parameters": recipe.active_parameters,
        "published_source": recipe.source or None,
        "stages": [_stage(found, index) for index in range(len(found.facts.stages))],
        "groups": [dataclasses.asdict(one) for one in found.nodes],
        "plan": _plan(found),
        "lockstep": _lockstep(found),
        "schedule": _schedule(found),
        "corpus_bytes": found.corpus_bytes,
        "checkpoints": _checkpoints(found),
        "predicted": _predicted(found),
    }


def outcome_text(found: Outcome) -> str:
    """Sections for what could be looked at, then reasons, then the verdict on the last line."""
    document = outcome_document(found)
    sections = [
        _head(document),
        _stage_table(document),
        _group_table(document),
        _plan_lines(document),
        *_listed("note", document["notes"]),
        *_listed("warning", document["warnings"]),
        *_listed("PROBLEM", document["problems"]),
        _verdict(document),
    ]
    return "\n".join(section for section in sections if section)


def _stage(found: Outcome, index: int) -> dict[str, Any]:
    facts = found.facts.stages[index]
    return {
        "chunk_dense_layers": facts.chunk_dense_layers,
        "chunk_moe_layers": facts.chunk_moe_layers,
        "parameters_on_a_gpu": facts.dense_parameters + facts.expert_parameters,
        "memory_gib": {
            str(row.level): {
                part.name: getattr(row.memory, part.name) / _GIB
                for part in dataclasses.fields(row.memory)
            }
            | {"total": row.total / _GIB}
            for row in found.memories
            if row.stage == index
        },
    }


def _plan(found: Outcome) -> dict[str, Any] | None:
    plan = found.plan
    if plan is None:
        return None
    ours = np.bincount(plan.microbatch_level, minlength=len(plan.levels))
    return {
        "from": found.facts.plan_from,
        "hash": plan.hash(),
        "counts": plan.counts(),
        "num_ranks": plan.num_ranks,
        "num_microbatches": plan.num_microbatches,
        "token_budget": plan.token_budget,
        "levels": [
            {"level": str(level), "microbatches": int(count)}
            for level, count in zip(plan.levels, ours, strict=True)
        ],
        "metrics": plan.metrics(),
    }


def _lockstep(found: Outcome) -> dict[str, Any] | None:
    proof = found.lockstep
    if proof is None:
        return None
    return {
        "digest": proof.digest,
        "collectives_of_the_busiest_rank": proof.num_collectives,
        "rank_hashes": [f"{word:016x}" for word in proof.hashes.tolist()],
        "cp_groups": {str(size): len(groups) for size, groups in proof.cp_groups.items()},
    }


def _schedule(found: Outcome) -> dict[str, Any] | None:
    told, plan = found.facts.arguments, found.plan
    if not told or plan is None or told["train_iters"] is None:
        return None
    decay = told["lr_decay_iters"] or told["train_iters"]
    fraction = told["lr_warmup_fraction"]
    return {
        "steps": told["train_iters"],
        "steps_done": found.facts.steps_done,
        "epochs": plan.epochs,
        "curriculum_steps": plan.curriculum_steps,
        "tokens_a_step": plan.slots_per_step * plan.token_budget,
        "lr": told["lr"],
        "min_lr": told["min_lr"],
        "lr_warmup_steps": told["lr_warmup_iters"] if fraction is None else fraction * decay,
        "lr_reaches_minimum_at_step": decay,
        "lr_decay_style": told["lr_decay_style"],
    }


def _checkpoints(found: Outcome) -> dict[str, Any] | None:
    sizes = found.checkpoints
    if sizes is None:
        return None
    return dataclasses.asdict(sizes) | {
        "bytes_kept": sizes.bytes_kept,
        "most_bytes": sizes.most_bytes,
    }


def _predicted(found: Outcome) -> dict[str, Any] | None:
    line = found.timeline
    if line is None:
        return None
    seconds = float(line.seconds.sum())
    return {
        "gpu_days": line.gpu_days,
        "days": seconds / _DAY,
        "mean_step_seconds": seconds / len(line.seconds),
    }


def _head(document: dict[str, Any]) -> str:
    lines = [f"{document['title'] or document['recipe']}"]
    layout = document["layout"]
    lines.append(
        f"{document['gpus']} x {document['device']} ({document['device_gib']:.1f} GiB), nodes of "
        f"{document['gpus_per_node']}, Transformer Engine {document['transformer_engine']} assumed"
    )
    if layout is not None:
        parts = [f"TP {layout['tp_size']}", f"PP {layout['num_stages']}"]
        if layout["num_virtual_stages"] > 1:
            parts.append(f"{layout['num_virtual_stages']} virtual stages")
        parts += [f"EP {layout['ep_size']}", f"expert TP {layout['expert_tp_size']}"]
        parts.append(f"{layout['num_ranks']} ranks x {layout['num_microbatches']} micro-batches")
        lines.append(", ".join(parts))
    if document["parameters"] is not None:
        lines.append(
            f"parameters {_billions(document['parameters'], document['published_parameters'])}; "
            f"active {_active(document)}"
        )
    return "\n".join(lines)


def _billions(counted: int, published: float | None) -> str:
    text = f"{counted / 1e9:.2f} B"
    if published is None:
        return text
    return f"{text} (published {published / 1e9:.2f} B, {100 * (counted / published - 1):+.2f} %)"


def _active(document: dict[str, Any]) -> str:
    """Beside the published count, in the way of counting that is nearer to it."""
    published = document["published_active_parameters"]
    whole, without = document["active_parameters"], document["active_without_embedding"]
    if published is None or abs(whole - published) <= abs(without - published):
        return _billions(whole, published)
    return f"{whole / 1e9:.2f} B, without the input embedding {_billions(without, published)}"


def _stage_table(document: dict[str, Any]) -> str:
    stages = document["stages"]
    if not stages:
        return ""
    levels = list(stages[0]["memory_gib"])
    rows: list[list[str | int | float]] = [
        ["stage", "dense", "MoE layers", "M parameters a GPU", *(f"GiB {one}" for one in levels)]
    ]
    for index, stage in enumerate(stages):
        rows.append(
            [
                str(index),
                "+".join(map(str, stage["chunk_dense_layers"])),
                "+".join(map(str, stage["chunk_moe_layers"])),
                f"{stage['parameters_on_a_gpu'] / 1e6:.1f}",
                *(f"{stage['memory_gib'][one]['total']:.1f}" for one in levels),
            ]
        )
    return "\n" + table(rows)


def _group_table(document: dict[str, Any]) -> str:
    groups = document["groups"]
    if not groups:
        return ""
    rows: list[list[str | int | float]] = [["groups", "members", "number", "on several nodes"]]
    for one in groups:
        crossing = f"{one['crossing']}, up to {one['most_nodes']}" if one["crossing"] else "none"
        rows.append([one["kind"].upper(), one["size"], one["num_groups"], crossing])
    return "\n" + table(rows)


def _plan_lines(document: dict[str, Any]) -> str:
    plan, schedule, proof = (document[name] for name in ("plan", "schedule", "lockstep"))
    if plan is None:
        return ""
    source = {
        "lengths": "planned from lengths, the corpus not being here",
        "corpus": "planned from its corpus",
        "plan": "its own",
    }[plan["from"]]
    counts = plan["counts"]
    levels = ", ".join(f"{one['level']} {one['microbatches']}" for one in plan["levels"])
    lines = [
        "",
        f"plan {plan['hash'][:12]} ({source}): {counts['sequences_kept']} of "
        f"{counts['sequences_in']} sequences, {counts['packs']} packs; micro-batches: {levels}; "
        f"padding {plan['metrics']['padding_ratio']:.2%}, tokens that pay for CP "
        f"{plan['metrics']['communication_ratio']:.1%}",
    ]
    if proof is not None and proof["digest"]:
        counted = ", ".join(
            f"{kind} {number}" for kind, number in proof["collectives_of_the_busiest_rank"].items()
        )
        lines.append(
            f"lockstep: all {document['gpus']} GPUs issue the same collectives in every group "
            f"({counted} on the busiest), digest {proof['digest']}"
        )
    if schedule is not None:
        done = f", {schedule['steps_done']} done" if schedule["steps_done"] else ""
        lines.append(
            f"{schedule['steps']} steps{done} of {schedule['tokens_a_step'] / 1e6:.2f} M tokens, "
            f"{schedule['epochs']} epochs, the first {schedule['curriculum_steps']} steps on CP 1; "
            f"learning rate {schedule['lr']:g} after {schedule['lr_warmup_steps']:.0f} steps, "
            f"{schedule['min_lr']:g} at step {schedule['lr_reaches_minimum_at_step']}"
        )
    if document["corpus_bytes"] is not None:
        lines.append(f"a corpus of them takes {document['corpus_bytes'] / _GIB:.1f} GiB")
    sizes = document["checkpoints"]
    if sizes is not None:
        lines.append(
            f"checkpoints of {sizes['bytes_each'] / _GIB:.0f} GiB in {sizes['files_each']} files; "
            f"{sizes['kept']} kept: {sizes['bytes_kept'] / _GIB:.0f} GiB, at most "
            f"{sizes['most_bytes'] / _GIB:.0f} GiB at once"
        )
    predicted = document["predicted"]
    if predicted is not None:
        hours = 24 * predicted["days"]
        lines.append(
            f"predicted {predicted['mean_step_seconds']:.1f} s a step, {hours:.1f} hours, "
            f"{predicted['gpu_days']:.1f} GPU-days"
        )
    return "\n".join(lines)


def _listed(word: str, sentences: list[str]) -> list[str]:
    return [f"{word}: {sentence}" for sentence in sentences]


def _verdict(document: dict[str, Any]) -> str:
    if document["fits"]:
        warned = len(document["warnings"])
        return "fits" + (f", with {warned} warning{'s' * (warned > 1)}" if warned else "")
    number = len(document["problems"])
    return f"does not fit: {number} problem{'s' * (number > 1)}"
