"""A run stops on four ranks and goes on with two: every sequence once an epoch, the learning rate
at its minimum at the last step; and every checkpoint that does not fit the plan is refused.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_hbp import cli
from megatron_hbp.plan import Plan
from tests.distributed import flags, handmade

BUDGET, RANKS, MICROBATCHES, STOP = 32, 4, 2, 4
LENS = [60, 33, 45, *[3 + (11 * i) % 29 for i in range(70)]]
OVERRIDE = "--override-opt_param-scheduler"


def _hbp(*argv: object) -> None:
    assert cli.main([str(word) for word in argv]) == 0


class _Runs:
    """One plan for four ranks, trained to step STOP of its first epoch, and what follows."""

    def __init__(self, cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        self.log = folder / "log"
        handmade.random_corpus(folder / "corpus", LENS)
        _hbp(
            *("plan", "--corpus", folder / "corpus", "--level", "32:1", "--level", "64:2"),
            *("--ranks", RANKS, "--microbatches", MICROBATCHES, "--epochs", 2),
            *("--output", folder / "plan"),
        )
        self.plan = Plan.load(folder / "plan")
        assert self.plan.epoch_offsets[1] > STOP + 1
        self.first = self.train(
            RANKS,
            "plan",
            *("--save", self.checkpoint, "--save-interval", 100, "--exit-interval", STOP),
            target="train",
        )
        self.replan(2, 1, "new")
        self.new = Plan.load(folder / "new")

    def replan(self, num_ranks: int, num_microbatches: int, name: str, consumed=STOP) -> None:
        _hbp(
            *("replan", self.folder / "plan", "--consumed", consumed, "--ranks", num_ranks),
            *("--microbatches", num_microbatches, "--output", self.folder / name),
        )

    def train(self, num_ranks: int, plan: str, *more: object, target: str = "printed_error"):
        shape = Plan.load(self.folder / plan, verify=False)
        argv = [
            *flags.COMMON,
            *flags.SIZE,
            *flags.GQA,
            *["--num-layers", "2", "--seq-length", str(BUDGET)],
            *["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"],
            *["--lr-decay-style", "cosine", "--min-lr", "1e-4", "--lr-warmup-iters", "2"],
            *["--global-batch-size", str(num_ranks * shape.num_microbatches)],
            *["--hbp-plan", str(self.folder / plan), "--hbp-step-log", str(self.log)],
        ]
        return self.cluster.run(
            num_ranks,
            f"tests.distributed.jobs_recorded:{target}",
            argv=[*argv, *map(str, more)],
        )

    def error(self, num_ranks: int, plan: str, *more: object) -> str:
        """The one line that a run which must not start prints."""
        ended = self.train(num_ranks, plan, *more)
        assert [result["code"] for result in ended] == [1] * num_ranks
        error = ended[0]["error"]
        assert error.startswith("megatron_hbp: error: ")
        assert error.count("\n") == 1
        return error.removeprefix("megatron_hbp: error: ")


@pytest.fixture(scope="module")
def runs(cluster, tmp_path_factory) -> _Runs:
    return _Runs(cluster, tmp_path_factory.mktemp("replan"))


def _logged_ids(folder: Path, plan: Plan) -> list[int]:
    lines = [json.loads(x) for f in folder.iterdir() for x in f.read_text().splitlines()]
    return [
        i
        for line in lines
        if line["plan"] == plan.hash()[:12] and "step" in line
        for m in line["microbatches"]
        for i in m["sequences"]
    ]


def test_fewer_ranks_train_the_rest(runs, capsys):
    """8 slots a step, then 2: from the log of both runs every sequence once an epoch."""
    later = runs.folder / "later"
    resumed = runs.train(
        *(2, "new", "--load", runs.checkpoint, OVERRIDE, "--lr-warmup-iters", 8),
        *("--save", later, "--save-interval", 100, "--exit-interval", STOP + 6),
        target="train",
    )
    last = runs.train(2, "new", "--load", later, "--lr-warmup-iters", 8, target="train")
    ids = _logged_ids(runs.log, runs.plan) + _logged_ids(runs.log, runs.new)
    assert sorted(ids) == sorted([*range(len(LENS))] * 2)
    for plan, parent in (("plan", None), ("new", "plan")):
        argv = ["audit", runs.folder / plan, "--step-log", runs.log, "--corpus"]
        argv += [runs.folder / "corpus"]
        _hbp(*argv, *(["--parent", runs.folder / parent] if parent else []))
        trained = STOP if plan == "plan" else runs.new.num_steps
        assert f"good: steps 1 to {trained} of " in capsys.readouterr().out
    first = runs.first[0]
    rates = [r for run in (first, resumed[0], last[0]) for r in run["learning_rates"]]
    losses = [x["lm loss"] for run in (first, resumed[0], last[0]) for x in run["losses"]]
    assert len(rates) == len(losses) == STOP + runs.new.num_steps
    assert rates[-1] == 1e-4  # the minimum, at the last step and not before
    assert min(rates[:-1]) > 1e-4
    # one cosine over slots: 16 of warm-up, then down to the last slot of both plans
    slots = [8 * STOP + 2 * step for step in range(1, runs.new.num_steps + 1)]
    phase = (np.array(slots) - 16) / (slots[-1] - 16)
    np.testing.assert_allclose(rates[STOP:], 1e-4 + 9e-4 * 0.5 * (1 + np.cos(np.pi * phase)))
    assert np.isfinite(losses).all()
    assert abs(losses[STOP] - losses[STOP - 1]) < 0.5
    # and the second stop, of the replanned run, needed no flag and went on with its next step
    assert len(resumed[0]["losses"]) == 6


def test_weights_and_optimizer_go_on(runs):
    """The first step after the replan starts from the weights that the checkpoint holds."""
    resumed = runs.train(
        *(2, "new", "--load", runs.checkpoint, OVERRIDE, "--lr-warmup-iters", 8),
        *("--exit-interval", STOP + 1, "--hbp-step-log", runs.folder / "other_log"),
        target="train",
    )
    for name, weight in runs.first[0]["weights"].items():
        assert (resumed[0]["weights_at_start"][name] == weight).all(), name
    assert len(resumed[0]["losses"]) == 1


def test_br_j07_other_ranks_without_a_replan_are_refused(runs):
    """The plan itself on two ranks, and a new plan for two ranks: neither starts."""
    error = runs.error(2, "plan", "--load", runs.checkpoint, "--global-batch-size", 4)
    assert error.startswith("the plan is for 4 ranks, the run has 2 ")
    assert "hbp replan" in error
    _hbp(
        *("plan", "--corpus", runs.folder / "corpus", "--level", "32:1", "--level", "64:2"),
        *("--ranks", 2, "--epochs", 2, "--output", runs.folder / "fresh"),
    )
    error = runs.error(2, "fresh", "--load", runs.checkpoint)
    fresh = Plan.load(runs.folder / "fresh")
    assert error.startswith(
        f"the checkpoint {runs.checkpoint}/iter_0000004 stands at step {STOP} of plan "
        f"{runs.plan.hash()[:12]} ({runs.folder}/plan), this run has plan {fresh.hash()[:12]}: "
    )
    assert (
        f"`hbp replan {runs.folder}/plan --consumed {STOP} --ranks 2 --microbatches 1 --output DIR`"
    ) in error
    assert error.endswith("or start over with --finetune\n")


def test_a_replan_of_another_step_is_refused(runs):
    runs.replan(2, 1, "early", consumed=STOP - 1)
    error = runs.error(2, "early", "--load", runs.checkpoint, OVERRIDE)
    assert f"continues {runs.plan.hash()[:12]} after step {STOP - 1}, the checkpoint " in error
    assert f"stands at step {STOP}: go on with `hbp replan {runs.folder}/plan --consumed 4" in error


def test_the_schedule_must_be_said_to_change(runs):
    load = ["--load", runs.checkpoint]
    error = runs.error(2, "new", *load, "--lr-warmup-iters", 8)
    assert error.startswith(f"{OVERRIDE} is missing: the plan continues another one")
    error = runs.error(2, "new", *load, OVERRIDE)
    assert error.startswith("--lr-warmup-iters 2 is 4 samples at --global-batch-size 2, the check")
    assert error.endswith("warms up over 16; use --lr-warmup-iters 8\n")
    error = runs.error(4, "plan", *load, "--train-iters", 7)
    assert error.startswith("the learning rate decays over 56 samples, in the checkpoint ")
    assert OVERRIDE in error


def test_a_checkpoint_without_a_plan_is_refused(runs):
    stock = runs.folder / "stock"
    argv = [*flags.COMMON, *flags.SIZE, *flags.GQA, "--num-layers", "2"]
    argv += ["--seq-length", str(BUDGET), "--global-batch-size", "2", "--train-iters", "1"]
    runs.cluster.run(
        2,
        "tests.distributed.jobs_stock:pretrain",
        argv=[*argv, "--eval-iters", "0", "--save", str(stock), "--save-interval", "1"],
    )
    error = runs.error(2, "new", "--load", stock)
    assert error.startswith(f"the checkpoint {stock}/iter_0000001, iteration 1, names no plan: ")
    assert "add --finetune" in error
    # with --finetune a plan starts at its first step, also one that continues another
    begun = runs.folder / "begun"
    log = runs.folder / "finetune_log"
    more = ["--no-load-optim", "--no-load-rng", "--hbp-step-log", log]
    stop = ["--save", begun, "--save-interval", 100, "--exit-interval", 3]
    tuned = runs.train(2, "new", "--finetune", "--load", stock, *more, *stop, target="train")
    assert len(tuned[0]["losses"]) == 3
    # and what it saves is told apart from the continued run: it goes on with step 4
    on = runs.train(2, "new", "--load", begun, "--hbp-step-log", log, target="train")
    assert len(on[0]["losses"]) == runs.new.num_steps - 3
    assert on[0]["learning_rates"][-1] == 1e-4
    assert sorted(_logged_ids(log, runs.new)) == sorted(runs.new.sequence_ids.tolist())


def test_ranks_with_other_plans_end_in_one_line(runs):
    def ended(*names: str, training_too: bool = True):
        return runs.cluster.run(
            len(names),
            "tests.distributed.jobs_recorded:compare_plans",
            folders=[str(runs.folder / name) for name in names],
            training_too=training_too,
        )

    assert {result["code"] for result in ended("plan", "plan")} == {0}
    results = ended("plan", "plan", "new")
    assert [result["code"] for result in results] == [1, 1, 1]
    assert results[0]["error"] == (
        "megatron_hbp: error: ranks [2] hold another plan than rank 0 does: the corpus, the "
        "--hbp-plan or the release differs between nodes; copy the same to all of them\n"
    )
    (error, *_) = (r["error"] for r in ended("plan", "new", "plan", training_too=False))
    assert error.startswith("megatron_hbp: error: ranks [1] hold another validation plan than ")
    assert results[1]["error"] == results[2]["error"] == ""


@pytest.mark.slow
def test_tensor_and_pipeline_ranks_log_each_pack_once(runs, capsys):
    """TP 2 x PP 2 x 2 ranks: the log of the last stage proves the plan."""
    log = runs.folder / "tp_pp_log"
    _hbp(
        *("plan", "--corpus", runs.folder / "corpus", "--level", "32:1", "--level", "64:2"),
        *("--ranks", 2, "--microbatches", 2, "--stages", 2, "--tp", 2, "--sequence-parallel"),
        *("--output", runs.folder / "tp_pp"),
    )
    argv = [*flags.COMMON, *flags.SIZE, *flags.GQA, "--seq-length", str(BUDGET)]
    argv += ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    argv += ["--pipeline-model-parallel-size", "2", "--global-batch-size", "4"]
    argv += ["--hbp-plan", str(runs.folder / "tp_pp"), "--hbp-step-log", str(log)]
    runs.cluster.run(8, "tests.distributed.jobs_recorded:printed_error", argv=argv)
    assert len(list(log.iterdir())) == 4
    capsys.readouterr()
    _hbp("audit", runs.folder / "tp_pp", "--step-log", log)
    assert f"epoch 0: {len(LENS)} of {len(LENS)} sequences" in capsys.readouterr().out
