"""`hbp replan`: a plan and how far it was trained in, a plan of the rest for another layout out."""

import argparse
import json
from typing import Any

import numpy as np

from megatron_hbp.commands.layout import (
    add_layout,
    given_levels,
    names_alignment,
    run_alignment,
)
from megatron_hbp.config import MIXING_MODES
from megatron_hbp.plan import Plan
from megatron_hbp.replan import replan
from megatron_hbp.report.text import table

_DESCRIPTION = """Plans exactly the sequences that PLAN has not trained: the rest of the epoch in
which it was stopped, then the epochs to come, for other ranks, micro-batches or levels. Lengths,
drops, truncations, seed and weights stay. A run that loads the checkpoint goes on with --hbp-plan
OUTPUT."""


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "replan",
        help="plan what a stopped run has not trained, for other ranks",
        description=_DESCRIPTION,
    )
    parser.add_argument("plan", metavar="PLAN", help="the plan that was trained")
    stopped = parser.add_mutually_exclusive_group(required=True)
    stopped.add_argument(
        "--consumed",
        type=int,
        metavar="K",
        help="steps of PLAN that were trained; those of plans before it do not count",
    )
    stopped.add_argument(
        "--iteration",
        type=int,
        metavar="N",
        help="the checkpoint's iteration, as in latest_checkpointed_iteration.txt: the same as "
        "--consumed for a first plan, and with the steps of plans before it for a replanned one",
    )
    add_layout(parser, from_plan=True)
    parser.add_argument(
        "--mixing", choices=MIXING_MODES, help="what a step holds (default: the plan's)"
    )
    parser.add_argument(
        "--curriculum-steps",
        type=int,
        metavar="N",
        help="steps at the start that train CP 1 levels only (default: as many as it takes for the "
        "tokens of the plan's curriculum that are not trained)",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="where the plan is saved")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(func=run)


def run(namespace: argparse.Namespace) -> int:
    parent = Plan.load(namespace.plan)
    levels = given_levels(namespace)
    aligned = levels is not None or names_alignment(namespace)
    plan = replan(
        parent,
        _consumed_steps(parent, namespace),
        levels=levels,
        num_ranks=namespace.ranks,
        num_microbatches=namespace.microbatches,
        num_stages=namespace.stages,
        num_virtual_stages=namespace.virtual_stages,
        mixing=namespace.mixing,
        curriculum_steps=namespace.curriculum_steps,
        alignment=run_alignment(namespace, levels or parent.levels) if aligned else None,
    )
    plan.save(namespace.output)
    document = _document(plan, parent) | {"output": namespace.output}
    print(json.dumps(document, indent=2) if namespace.json else _text(plan, document))
    return 0


def _consumed_steps(parent: Plan, namespace: argparse.Namespace) -> int:
    if namespace.iteration is None:
        return namespace.consumed
    if namespace.iteration < parent.steps_before:
        raise ValueError(
            f"--iteration is {namespace.iteration}, but {namespace.plan} starts at iteration "
            f"{parent.steps_before}: name the plan that was trained at that iteration, or count "
            "the steps of this one with --consumed"
        )
    return namespace.iteration - parent.steps_before


def _document(plan: Plan, parent: Plan) -> dict[str, Any]:
    counts = plan.counts()
    trained = parent.pack_offsets[
        parent.microbatch_offsets[plan.parent_steps * parent.num_microbatches]
    ]
    return {
        "hash": plan.hash(),
        "parent_hash": plan.parent_hash,
        "parent_steps": plan.parent_steps,
        "parent_num_steps": parent.num_steps,
        "sequences_trained": int(trained),
        "first_epoch": plan.first_epoch,
        "sequences_first_epoch": int(
            plan.pack_offsets[
                plan.microbatch_offsets[plan.epoch_offsets[1] * plan.num_microbatches]
            ]
        ),
        "sequences_to_come": len(plan.sequence_ids),
        "steps_before": plan.steps_before,
        "slots_before": plan.slots_before,
        "steps_per_epoch": np.diff(plan.epoch_offsets).tolist(),
        "last_iteration": plan.steps_before + plan.num_steps,
        "global_batch_size": plan.slots_per_step,
        "curriculum_steps": plan.curriculum_steps,
        "levels": [str(level) for level in plan.levels],
        "counts": counts,
        "metrics": plan.metrics(),
    }


def _text(plan: Plan, document: dict[str, Any]) -> str:
    steps = document["steps_per_epoch"]
    rest = "the rest of it" if plan.carried_ids is not None else "all of it"
    rows = [
        ["", "steps", "sequences"],
        ["trained of the parent", plan.parent_steps, document["sequences_trained"]],
        [f"epoch {plan.first_epoch}, {rest}", steps[0], document["sequences_first_epoch"]],
        [
            f"epochs after it, {plan.epochs - 1} of them",
            sum(steps[1:]),
            document["sequences_to_come"] - document["sequences_first_epoch"],
        ],
    ]
    metrics = document["metrics"]
    metric_rows = [
        ["metric", "value", "bound"],
        *(
            [name, metrics[name], metrics[f"{name}_bound"]]
            for name in metrics
            if not name.endswith("_bound")
        ),
    ]
    run_with = (
        f"levels {' '.join(document['levels'])}, {plan.num_ranks} ranks, {plan.num_microbatches} "
        f"micro-batches a step, {plan.token_budget} tokens per rank and micro-batch\n"
        f"the run goes on from iteration {plan.steps_before} to {document['last_iteration']}\n"
        f"train it with --hbp-plan {document['output']} --global-batch-size {plan.slots_per_step} "
        f"--seq-length {plan.token_budget} --override-opt_param-scheduler --load CHECKPOINT"
    )
    head = (
        f"plan {document['hash']}\n"
        f"goes on from {plan.parent_hash} after {plan.parent_steps} of its "
        f"{document['parent_num_steps']} steps"
    )
    saved = f"saved in {document['output']}"
    return "\n\n".join([head, table(rows), run_with, table(metric_rows), saved])
