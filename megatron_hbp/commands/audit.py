"""`hbp audit`: proves a plan, or says what is wrong with it."""

import argparse
from pathlib import Path

import numpy as np

from megatron_hbp.audit import array_hash
from megatron_hbp.commands.given import Given, add_input, read_input
from megatron_hbp.plan import Plan


def add_command(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "audit", help="check every invariant of a plan; exit code 1 when one is violated"
    )
    parser.add_argument("plan", metavar="PLAN", help="the folder of the plan")
    add_input(parser, required=False)
    parser.set_defaults(func=run)


def run(namespace: argparse.Namespace) -> int:
    given = read_input(namespace)
    if not (Path(namespace.plan) / "plan.json").is_file():
        raise ValueError(
            f"{namespace.plan} holds no plan.json; name a folder made by hbp plan --output"
        )
    try:
        plan = Plan.load(namespace.plan)
    except ValueError as error:
        print(error)
        return 1
    problems = plan.audit(None if given is None else given.seq_lens)
    if given is not None and given.corpus_hash is not None:
        problems += _corpus_problems(plan, given)
    for problem in problems:
        print(problem)
    if not problems:
        print(
            f"good: {plan.num_steps} steps, {plan.num_packs} packs, "
            f"{plan.counts()['sequences_kept']} sequences, hash {plan.hash()[:12]}"
        )
    return 1 if problems else 0


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
