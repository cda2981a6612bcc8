"""Checks that need no whole command line; test_errors.py goes through the entry point."""

from argparse import Namespace

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs the extra [train]")

from megatron_hbp.host import checks
from megatron_hbp.host.iterations import set_iterations
from megatron_hbp.level import Level
from megatron_hbp.planner import build_plan

LEVELS = (Level(64, 1), Level(128, 2))


def _args(**changes):
    settings = {
        "seq_length": 64,
        "num_attention_heads": 8,
        "num_query_groups": 8,
        "group_query_attention": False,
        "multi_latent_attention": False,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "fp8": None,
        "fp8_recipe": "delayed",
        "recompute_granularity": None,
        "max_position_embeddings": 128,
    }
    return Namespace(**settings | changes)


def _plan(sequences):
    return build_plan(np.full(sequences, 64), [Level(64, 1)], 2)


def test_levels_that_fit():
    checks.check_levels_fit(_args(), LEVELS)
    checks.check_levels_fit(_args(recompute_granularity="selective"), (Level(64, 1, "full"),))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"num_query_groups": 4, "group_query_attention": True}, None),
        ({"num_query_groups": 1, "group_query_attention": True}, None),
        # 12 heads and 3 groups: neither 3 nor 2 divides the other
        (
            {"num_attention_heads": 12, "num_query_groups": 3, "group_query_attention": True},
            "level 128:2: CP size 2 and the 3 key/value heads of a tensor-parallel rank",
        ),
        # the same groups count for nothing under MLA, or when groups are off
        ({"num_attention_heads": 12, "num_query_groups": 3, "multi_latent_attention": True}, None),
        (
            {"tensor_model_parallel_size": 8},
            "level 128:2: CP size 2 does not divide the 1 attention heads",
        ),
        # groups are repeated by the host when TP exceeds them
        (
            {
                "tensor_model_parallel_size": 4,
                "num_query_groups": 2,
                "group_query_attention": True,
            },
            None,
        ),
    ],
)
def test_heads_of_one_tensor_parallel_rank_count(changes, refused):
    if refused is None:
        checks.check_levels_fit(_args(**changes), LEVELS)
        return
    with pytest.raises(ValueError, match=refused):
        checks.check_levels_fit(_args(**changes), LEVELS)


@pytest.mark.parametrize(
    ("changes", "budget_multiple"),
    [
        ({}, 1),
        ({"tensor_model_parallel_size": 4}, 1),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, 4),
        ({"fp8_recipe": "mxfp8"}, 1),  # a recipe without FP8 counts for nothing
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, 16),
        (
            {
                "fp8": "e4m3",
                "fp8_recipe": "mxfp8",
                "tensor_model_parallel_size": 4,
                "sequence_parallel": True,
            },
            128,
        ),
    ],
)
def test_the_run_alignment_comes_from_the_flags(changes, budget_multiple):
    wanted = checks.run_alignment(_args(**changes), LEVELS)
    assert wanted.budget_multiple == budget_multiple
    assert wanted.document_multiples == (1, 1)


def _schedule(**changes):
    settings = {
        "eval_iters": 100,
        "eval_interval": None,
        "lr_decay_iters": None,
        "lr_warmup_iters": 0,
    }
    return Namespace(**settings | changes)


def test_steps_come_from_the_plan():
    plan, valid = _plan(8), _plan(6)
    args = _schedule(train_iters=None)
    set_iterations(args, plan, valid)
    assert (args.train_iters, args.eval_iters) == (plan.num_steps, valid.num_steps) == (4, 3)
    assert args.eval_interval == 5  # no step of the 4 is a multiple; the host divides by it
    args = _schedule(train_iters=2, eval_interval=3)
    set_iterations(args, plan, None)
    assert (args.train_iters, args.eval_iters, args.eval_interval) == (2, 0, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"train_iters": 5},
            r"--train-iters 5 is beyond the plan's 4 steps \(1 epochs\); raise --hbp-epochs",
        ),
        ({"eval_iters": 2}, "--eval-iters is 2; the validation corpus takes 3 evaluation steps"),
        ({"lr_warmup_iters": 4}, "--lr-warmup-iters 4 is not below the 4 steps"),
        ({"lr_warmup_iters": 3, "lr_decay_iters": 2}, "--lr-warmup-iters 3 is not below the 2"),
    ],
)
def test_steps_against_the_plan_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        set_iterations(_schedule(**{"train_iters": None} | given), _plan(8), _plan(6))


def test_the_vocabulary_holds_every_token():
    checks.check_vocabulary(Namespace(padded_vocab_size=256), 255, "corpus")
    with pytest.raises(
        ValueError, match=r"corpus holds token id 256, the model's vocabulary has 2"
    ):
        checks.check_vocabulary(Namespace(padded_vocab_size=256), 256, "corpus")
