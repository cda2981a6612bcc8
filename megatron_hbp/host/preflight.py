"""python -m megatron_hbp.host.preflight QUESTION.json: the child of `hbp check`.

Everything that a start does with the run's true flags, world size and device, up to the point where
a GPU is needed, in one process without a GPU or a network. What it finds goes to facts.json beside
the question, what the host prints to host.log.

Guarantees (asserted by tests/host/test_preflight.py): the checks are those of a real start, called
with the same arguments; where one of them ends the run the rest that can be looked at still is.
"""

import contextlib
import dataclasses
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_hbp.check.facts import Facts, Question
from megatron_hbp.config import HbpConfig, config_from_args, in_flags
from megatron_hbp.host.host_words import (
    host_words,
    is_about_flags,
    is_host,
    last_words,
    own_words,
)
from megatron_hbp.level import Level
from megatron_hbp.plan import Plan


def main() -> None:
    """Answers the question named on the command line."""
    question = Question.load(sys.argv[1])
    folder = Path(question.workspace)
    log = os.open(folder / "host.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    facts = Facts()
    answer(question, facts)
    facts.save(folder)


def answer(question: Question, facts: Facts) -> None:
    """Fills in the facts. Installs the stand-in device: once per process."""
    os.environ |= {
        "WORLD_SIZE": str(question.gpus),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "HF_HUB_OFFLINE": "1",  # a tokenizer by name would be looked up on the network
    }
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # examples/launch sets it
    sys.argv = ["hbp check", *question.flags]
    from megatron_hbp.host import cpu

    cpu.install("meta", capability=question.capability, device_count=question.gpus_per_node)
    from megatron_hbp.host import compat

    compat.check_host_version()
    compat.use_bundled_dataset_helpers()
    compat.assume_transformer_engine(question.transformer_engine)
    compat.open_no_logs()
    with _told(facts):
        args, config, model_config = _arguments(facts)
        levels = config.level
        with _told(facts):
            _weights(facts, args)
        with _told(facts):
            plan = _plan(question, facts, args, config)
            levels = levels if plan is None else plan.levels
        with _told(facts):
            _cluster(facts, args, model_config, levels)


class _RefusalError(Exception):
    """A reason in our words."""


@contextlib.contextmanager
def _told(facts: Facts) -> Iterator[None]:
    """What ends the inside becomes a problem."""
    try:
        yield
    except _RefusalError as refusal:
        _add(facts, str(refusal))
    except ValueError as error:
        _add(facts, host_words(error) if is_host(error) else in_flags(str(error)))
    except Exception as error:
        traceback.print_exc()
        _add(facts, host_words(error) if is_host(error) else own_words(error))


def _add(facts: Facts, problem: str) -> None:
    """Unless an earlier check said it."""
    if not any(problem in told for told in facts.problems):
        facts.problems.append(problem)


def _arguments(facts: Facts) -> tuple[Any, HbpConfig, Any]:
    """The host's own validation, with our checks of the command line before it."""
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_hbp.host import checks, compat
    from megatron_hbp.host.pretrain_gpt import with_arguments

    given = {word.partition("=")[0] for word in sys.argv}
    if not given & {"--hbp-plan", "--hbp-corpus"}:
        raise _RefusalError("neither --hbp-plan nor --hbp-corpus is given; add one of them")
    with warnings.catch_warnings(record=True) as warned:
        try:
            args = parse_and_validate_args(extra_args_provider=with_arguments(None))
        except SystemExit as stop:
            raise _RefusalError(last_words(stop)) from None
        finally:
            facts.notes += [f"Megatron: {one.message}" for one in warned if is_about_flags(one)]
    config = config_from_args(args)
    checks.check_arguments(args, config)
    if config.level:
        checks.check_levels_fit(args, config.level)
    model_config = gpt_config_from_args(args)
    facts.arguments.update(_plain(args))
    if args.moe_token_dispatcher_type == "flex":
        facts.notes.append(
            f"the library of --moe-flex-dispatcher-backend {args.moe_flex_dispatcher_backend} is "
            "only assumed to be there"
        )
    with _told(facts), compat.assumed_fused_adam():
        pretrain_cfg_container_from_args(args, model_config)
    return args, config, model_config


def _plain(args: Any) -> dict[str, Any]:
    """The host's arguments that JSON can hold."""
    kinds = bool | int | float | str | None
    return {name: value for name, value in vars(args).items() if isinstance(value, kinds)} | {
        name: value
        for name, value in vars(args).items()
        if isinstance(value, list) and all(isinstance(item, kinds) for item in value)
    }


def _weights(facts: Facts, args: Any) -> None:
    """The weights that the run starts from, where they are here."""
    from megatron_hbp.host.checkpoint import check_weights

    folder = args.pretrained_checkpoint or (args.load if args.finetune else None)
    if folder is not None and not Path(folder).exists():
        facts.notes.append(f"the folder {folder} is not here: its weights are not looked at")
    else:
        check_weights(args)


def _plan(question: Question, facts: Facts, args: Any, config: HbpConfig) -> Plan | None:
    """The run's own plan where its files are here, else one of the lengths given."""
    from megatron_hbp.host import checks
    from megatron_hbp.host.iterations import set_iterations
    from megatron_hbp.host.resume import find_start

    plan = _run_plan(question, facts, args, config)
    if plan is None:
        return None
    checks.check_levels_fit(args, plan.levels)
    valid = _valid_plan(question, facts, args, config, plan)
    start = find_start(args, plan)
    set_iterations(args, plan, valid, start)
    folder = Path(question.workspace) / "plan"
    plan.save(folder)
    facts.plan = str(folder)
    facts.steps_done = start.first_iteration + (start.consumed_steps or 0)
    facts.arguments.update(_plain(args))
    return plan


def _run_plan(question: Question, facts: Facts, args: Any, config: HbpConfig) -> Plan | None:
    from megatron_hbp.corpus.joint import parts_of
    from megatron_hbp.host import checks
    from megatron_hbp.host.plan_source import check_plan, check_plan_flags, training_plan
    from megatron_hbp.host.pretrain_gpt import run_shape

    shape = run_shape(args)
    folders = config.corpus or (() if config.plan is None else _corpora_of(config.plan))
    missing = [folder for folder in folders if not Path(folder).exists()]
    if not missing:
        plan, corpus = training_plan(_writing_to(question, config), shape)
        for part in parts_of(corpus):
            checks.check_vocabulary(args, part.max_token_id, str(part.path))
        facts.plan_from = "corpus" if config.plan is None else "plan"
        return plan
    facts.notes.append(
        f"the corpus {', '.join(missing)} is not here: its tokens are not looked at; check again "
        "where it is"
    )
    if config.plan is not None:
        plan = Plan.load(config.plan)
        check_plan_flags(config, plan)
        check_plan(plan, shape)
        facts.plan_from = "plan"
        return plan
    if question.lengths is None:
        facts.notes.append("there is no plan to look at; add --lengths FILE, or bring the corpus")
        return None
    facts.plan_from = "lengths"
    return _planned_from_lengths(question.lengths, args, config)


def _corpora_of(plan: str) -> tuple[str, ...]:
    return Plan.load(plan, verify=False).corpus_paths


def _writing_to(question: Question, config: HbpConfig) -> HbpConfig:
    """A check writes neither into the corpus' folder nor into the run's cache."""
    return dataclasses.replace(config, plan_cache=str(Path(question.workspace) / "plans"))


def _planned_from_lengths(path: str, args: Any, config: HbpConfig) -> Plan:
    import numpy as np

    from megatron_hbp.host.plan_source import plan_settings
    from megatron_hbp.host.pretrain_gpt import run_shape
    from megatron_hbp.level import check_levels
    from megatron_hbp.planner import build_plan

    shape = run_shape(args)
    check_levels(config.level, shape.num_ranks)
    return build_plan(
        np.load(path, allow_pickle=False),
        config.level,
        shape.num_ranks,
        num_microbatches=shape.num_microbatches,
        num_stages=shape.num_stages,
        num_virtual_stages=shape.num_virtual_stages,
        alignment=shape.alignment_of(config.level),
        **plan_settings(config),
    )


def _valid_plan(
    question: Question, facts: Facts, args: Any, config: HbpConfig, plan: Plan
) -> Plan | None:
    from megatron_hbp.host import checks
    from megatron_hbp.host.plan_source import validation_plan
    from megatron_hbp.host.pretrain_gpt import run_shape

    if config.valid_corpus is None:
        return None
    if not Path(config.valid_corpus).exists():
        facts.notes.append(f"--hbp-valid-corpus {config.valid_corpus} is not here")
        args.eval_iters = None  # how many there are cannot be known
        return None
    num_microbatches = args.eval_global_batch_size // args.data_parallel_size
    made = validation_plan(_writing_to(question, config), plan, num_microbatches, run_shape(args))
    assert made is not None
    checks.check_vocabulary(args, made[1].max_token_id, config.valid_corpus)
    return made[0]


def _cluster(facts: Facts, args: Any, model_config: Any, levels: tuple[Level, ...]) -> None:
    """All groups, and every stage's model, as the first rank of each stage."""
    from megatron_hbp.host.fake_cluster import all_groups, as_rank, own_groups
    from megatron_hbp.host.groups import domain_groups
    from megatron_hbp.host.meta_model import build_stage

    cp_sizes = tuple(sorted({level.cp_size for level in levels}))
    groups = all_groups(args)
    stages = []
    for rank in groups["pp"][0]:
        with as_rank(args, rank):
            for kind, ranks in own_groups().items():
                assert ranks in groups[kind], f"rank {rank}: another {kind} group than computed"
            domain_groups(cp_sizes)
            stages.append(build_stage(args, model_config, cp_sizes))
    facts.groups, facts.stages = groups, stages


if __name__ == "__main__":
    main()
