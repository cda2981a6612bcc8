"""`hbp audit`: proves a plan, or says what is wrong with it."""

import argparse
from pathlib import Path

import numpy as np

from megatron_hbp.audit import array_hash
from megatron_hbp.commands.given import Given, add_input, read_input
from megatron_hbp.lineage import lineage_problems
from megatron_hbp.plan import Plan
from megatron_hbp.trained import Trained, trained_steps


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "audit", help="check every invariant of a plan; exit code 1 when one is violated"
    )
    parser.add_argument("plan", metavar="PLAN", help="the folder of the plan")
    add_input(parser, required=False)
    parser.add_argument(
        "--parent",
        metavar="DIR",
        help="the plan that PLAN continues: check that PLAN is exactly what it has not trained",
    )
    parser.add_argument(
        "--step-log",
        metavar="DIR",
        help="the files of --hbp-step-log: check that every step so far trained the planned "
        "sequences, each once",
    )
    parser.set_defaults(func=run)


def run(namespace: argparse.Namespace) -> int:
    given = read_input(namespace)
    for folder in (namespace.plan, namespace.parent):
        if folder is not None and not (Path(folder) / "plan.json").is_file():
            raise ValueError(
                f"{folder} holds no plan.json; name a folder made by hbp plan --output"
            )
    try:
        plan = Plan.load(namespace.plan)
        parent = None if namespace.parent is None else Plan.load(namespace.parent)
    except ValueError as error:
        print(error)
        return 1
    problems = plan.audit(None if given is None else given.seq_lens)
    if given is not None and given.corpus_hash is not None:
        problems += _corpus_problems(plan, given)
    good = [
        f"good: {plan.num_steps} steps, {plan.num_packs} packs, "
        f"{plan.counts()['sequences_kept']} sequences, hash {plan.hash()[:12]}"
    ]
    if parent is not None and not problems:
        problems += lineage_problems(plan, parent)
        good.append(
            f"good: exactly what {parent.hash()[:12]} has not trained after {plan.parent_steps} of "
            f"{parent.num_steps} steps"
        )
    if namespace.step_log is not None and not problems:
        trained = trained_steps(namespace.step_log, plan)
        problems += trained.problems
        good.append(_trained_text(plan, trained))
    print("\n".join(problems or good))
    return 1 if problems else 0


def _trained_text(plan: Plan, trained: Trained) -> str:
    """How far the run is, epoch by epoch."""
    ends = np.minimum(plan.epoch_offsets, trained.steps)
    ends = plan.pack_offsets[plan.microbatch_offsets[ends * plan.num_microbatches]]
    all_ends = plan.pack_offsets[
        plan.microbatch_offsets[plan.epoch_offsets * plan.num_microbatches]
    ]
    epochs = ", ".join(
        f"epoch {plan.first_epoch + epoch}: {done} of {total} sequences"
        for epoch, (done, total) in enumerate(zip(np.diff(ends), np.diff(all_ends), strict=True))
    )
    return (
        f"good: steps 1 to {trained.steps} of {plan.num_steps} trained as planned, "
        f"{trained.restarts} restarts; {epochs}"
    )


def _corpus_problems(plan: Plan, given: Given) -> list[str]:
    """What only the corpus can tell: whether it is the plan's, and every sequence trains."""
    problems = []
    if plan.corpus_hash not in (None, given.corpus_hash):
        problems.append(
            f"the plan was made from corpus {plan.corpus_hash}, this one is {given.corpus_hash}"
        )
    first_trained = given.first_trained
    if first_trained is None or len(first_trained) != len(plan.seq_lens):
        return problems
    if plan.first_trained_hash not in (None, array_hash(first_trained)):
        problems.append("the plan was made from another mask (first_trained_hash differs)")
    untrained = np.flatnonzero((plan.seq_lens > 0) & (first_trained >= plan.seq_lens))
    if len(untrained):
        problems.append(
            f"{len(untrained)} kept sequences have no trained token {untrained[:5].tolist()}"
        )
    return problems
