"""A training run killed with SIGKILL at random moments goes on: no row is lost or trained again."""

import json
import random

import pytest

from megatron_hbp import cli
from megatron_hbp.plan import Plan
from megatron_hbp.trained import trained_steps
from tests.distributed import flags, handmade
from tests.distributed.cluster import JobError

RANKS, MICROBATCHES, KILLS = 4, 2, 3
LENS = [60, 33, 45, *[3 + (11 * i) % 29 for i in range(140)]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_training_trains_every_row_once_an_epoch(cluster, tmp_path, capsys, seed):
    """Three kills, a checkpoint every second step; then on two ranks to the end. The log of both
    plans, up to the step where the second took over, is each sequence once an epoch.
    """
    corpus, checkpoint, log = (tmp_path / name for name in ("corpus", "checkpoint", "log"))
    handmade.random_corpus(corpus, LENS)
    layout = ["--level", "32:1", "--level", "64:2", "--epochs", "2"]
    argv = ["plan", "--corpus", corpus, *layout, "--ranks", RANKS, "--microbatches", MICROBATCHES]
    assert cli.main([*map(str, argv), "--output", str(tmp_path / "plan")]) == 0
    plan = Plan.load(tmp_path / "plan")

    def flags_of(folder, batch, warmup):
        return [
            *[*flags.COMMON, *flags.SIZE, *flags.GQA, "--num-layers", "2", "--seq-length", "32"],
            *["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"],
            *["--global-batch-size", str(batch), "--lr-warmup-iters", str(warmup)],
            *["--hbp-plan", str(tmp_path / folder), "--hbp-step-log", str(log)],
            *["--save", str(checkpoint), "--load", str(checkpoint), "--save-interval", "2"],
        ]

    dice = random.Random(seed)
    for _ in range(KILLS):
        with pytest.raises(JobError):
            cluster.run(
                RANKS,
                "tests.distributed.jobs_recorded:train_and_die",
                argv=flags_of("plan", RANKS * MICROBATCHES, 2),
                log=str(log),
                steps=dice.randint(3, 5),
                victim=dice.randrange(RANKS),
                seconds=dice.uniform(0, 0.2),
            )
        found = trained_steps(log, plan)
        assert found.problems == []
    stopped = int((checkpoint / "latest_checkpointed_iteration.txt").read_text())
    assert 4 <= stopped <= found.steps < plan.num_steps
    assert found.restarts == KILLS - 1

    argv = ["replan", tmp_path / "plan", "--iteration", stopped, "--ranks", 2, "--microbatches", 2]
    assert cli.main([*map(str, argv), "--output", str(tmp_path / "new")]) == 0
    new = Plan.load(tmp_path / "new")
    more = ["--override-opt_param-scheduler"]
    (ended, _) = cluster.run(
        2,
        "tests.distributed.jobs_recorded:printed_error",
        argv=[*flags_of("new", 4, 4), *more],
    )
    assert ended["error"] == ""
    capsys.readouterr()
    argv = ["audit", tmp_path / "new", "--parent", tmp_path / "plan", "--step-log", log]
    assert cli.main([str(word) for word in argv]) == 0
    assert f"good: steps 1 to {new.num_steps} of {new.num_steps} " in capsys.readouterr().out

    ids = []
    for file in log.iterdir():
        last = {}  # of each plan and step the last run counts, up to where the next plan took over
        for line in map(json.loads, file.read_text().splitlines()):
            if "step" in line and (line["plan"] == new.hash()[:12] or line["step"] < stopped):
                last[line["plan"], line["step"]] = line["microbatches"]
        ids += [i for step in last.values() for m in step for i in m["sequences"]]
    assert sorted(ids) == sorted([*range(len(LENS))] * 2)
