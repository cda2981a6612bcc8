"""`hbp replan` and `hbp audit --parent`: results, exit codes, and one line for every wrong use."""

import dataclasses
import json

import numpy as np
import pytest

from megatron_hbp import Level, Plan, build_plan
from megatron_hbp.alignment import Alignment
from megatron_hbp.cli import main
from megatron_hbp.replan import replan

LENS = np.random.default_rng(0).integers(2, 200, 400)


@pytest.fixture
def parent(tmp_path):
    plan = build_plan(LENS, [Level(64, 1), Level(256, 4)], 8, 2, epochs=3)
    plan.save(tmp_path / "parent")
    return plan


def _replan(tmp_path, *flags, output="new"):
    folder = tmp_path / output
    argv = ["replan", str(tmp_path / "parent"), "--output", str(folder), *map(str, flags)]
    return main(argv), folder


def _error(capsys, tmp_path, *flags):
    code, folder = _replan(tmp_path, *flags)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert not folder.exists()
    assert err.startswith("hbp: error: ")
    assert err.count("\n") == 1
    return err


def test_text_says_what_was_trained_and_what_is_left(parent, tmp_path, capsys):
    stop = int(parent.epoch_offsets[1]) + 2
    code, folder = _replan(tmp_path, "--consumed", stop, "--ranks", 4, "--microbatches", 3)
    assert code == 0
    out, err = capsys.readouterr()
    assert err == ""
    plan = Plan.load(folder)
    assert plan.hash() == replan(parent, stop, num_ranks=4, num_microbatches=3).hash()
    rows = {line.rsplit(maxsplit=2)[0]: line.split()[-2:] for line in out.splitlines() if line}
    in_epoch_1 = 400 - len(plan.carried_ids)
    first = int(plan.epoch_offsets[1])
    assert rows["trained of the parent"] == [str(stop), str(400 + in_epoch_1)]
    assert rows["epoch 1, the rest of it"] == [str(first), str(400 - in_epoch_1)]
    assert rows["epochs after it, 1 of them"] == [str(plan.num_steps - first), "400"]
    assert f"goes on from {parent.hash()} after {stop} of its {parent.num_steps} steps" in out
    assert f"from iteration {stop} to {stop + plan.num_steps}\n" in out
    assert f"--hbp-plan {folder} --global-batch-size 12 --seq-length 64 --override-opt_p" in out


def test_json_holds_the_same(parent, tmp_path, capsys):
    stop = int(parent.epoch_offsets[1])
    code, folder = _replan(tmp_path, "--consumed", stop, "--ranks", 16, "--json")
    assert code == 0
    document = json.loads(capsys.readouterr().out)
    plan = Plan.load(folder)
    assert document["hash"] == plan.hash()
    assert document["parent_hash"] == parent.hash()
    assert document["first_epoch"] == 1
    assert document["sequences_trained"] == document["sequences_first_epoch"] == 400
    assert document["sequences_to_come"] == 800
    assert document["global_batch_size"] == 32
    assert document["slots_before"] == stop * 16
    assert (
        document["last_iteration"]
        == stop + plan.num_steps
        == stop + sum(document["steps_per_epoch"])
    )


def test_an_iteration_counts_the_steps_of_all_plans(parent, tmp_path, capsys):
    assert _replan(tmp_path, "--iteration", 5, "--ranks", 4, "--output", tmp_path / "a")[0] == 0
    first = Plan.load(tmp_path / "a")
    assert first.parent_steps == 5
    argv = ["replan", str(tmp_path / "a"), "--ranks", "8", "--output"]
    assert main([*argv, str(tmp_path / "b"), "--iteration", "7"]) == 0
    assert main([*argv, str(tmp_path / "c"), "--consumed", "2"]) == 0
    assert Plan.load(tmp_path / "b").hash() == Plan.load(tmp_path / "c").hash()
    assert Plan.load(tmp_path / "b").steps_before == 7
    capsys.readouterr()
    assert main([*argv, str(tmp_path / "d"), "--iteration", "4"]) == 2
    assert capsys.readouterr().err == (
        f"hbp: error: --iteration is 4, but {tmp_path}/a starts at iteration 5: name the plan that "
        "was trained at that iteration, or count the steps of this one with --consumed\n"
    )


def test_every_flag_reaches_the_plan(parent, tmp_path, capsys):
    flags = ["--level", "128:1", "--level", "256:2", "--ranks", 2, "--microbatches", 4]
    flags += ["--stages", 2, "--virtual-stages", 2, "--tp", 2, "--sequence-parallel"]
    flags += ["--fp8-recipe", "delayed", "--mixing", "step", "--curriculum-steps", 1]
    code, folder = _replan(tmp_path, "--consumed", 3, *flags)
    assert code == 0
    plan = Plan.load(folder)
    assert [str(level) for level in plan.levels] == ["128:1", "256:2"]
    assert (plan.num_ranks, plan.num_microbatches) == (2, 4)
    assert (plan.num_stages, plan.num_virtual_stages) == (2, 2)
    assert (plan.mixing, plan.curriculum_steps) == ("step", 1)
    assert plan.alignment == Alignment(32, (1, 1))


def test_the_alignment_stays_unless_flags_say_otherwise(tmp_path, capsys):
    plan = build_plan(LENS, [Level(64, 1), Level(256, 4)], 8, alignment=Alignment(16, (1, 1)))
    plan.save(tmp_path / "parent")
    stop = ["--consumed", 1, "--ranks", 4]
    assert _replan(tmp_path, *stop)[0] == 0
    assert Plan.load(tmp_path / "new").alignment == Alignment(16, (1, 1))
    assert _replan(tmp_path, *stop, "--tp", 2, "--sequence-parallel", output="tp")[0] == 0
    assert Plan.load(tmp_path / "tp").alignment == Alignment(2, (1, 1))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--ranks", 4], "one of the arguments --consumed --iteration is required; see hbp replan"),
        (["--consumed", 1, "--iteration", 1, "--ranks", 4], "not allowed with argument --consumed"),
        (["--consumed", 1], "the following arguments are required: --ranks"),
        (["--consumed", 999, "--ranks", 4], "999 steps are consumed, the plan has"),
        (["--consumed", 1, "--ranks", 6], "CP size 4 does not divide 6 ranks"),
        (["--consumed", 1, "--ranks", 4, "--tp", 0], "--tp is 0; it must be at least 1"),
        (
            ["--consumed", 1, "--ranks", 4, "--level", "64:1"],
            "tokens and is not trained yet, but the longest level holds 64",
        ),
    ],
)
def test_wrong_use(parent, tmp_path, capsys, flags, text):
    assert text in _error(capsys, tmp_path, *flags)


def test_everything_trained(parent, tmp_path, capsys):
    error = _error(capsys, tmp_path, "--consumed", parent.num_steps, "--ranks", 4)
    assert "nothing is left to plan" in error
    assert main(["replan", str(tmp_path), "--consumed", "1", "--ranks", "4", "--output", "x"]) == 2
    assert "holds no plan.json" in capsys.readouterr().err


def test_audit_proves_the_rest(parent, tmp_path, capsys):
    assert _replan(tmp_path, "--consumed", 4, "--ranks", 4)[0] == 0
    lengths = str(tmp_path / "lengths.npy")
    np.save(lengths, LENS)
    capsys.readouterr()
    argv = ["audit", str(tmp_path / "new"), "--parent", str(tmp_path / "parent")]
    assert main([*argv, "--lengths", lengths]) == 0
    assert capsys.readouterr().out.endswith(
        f"good: exactly what {parent.hash()[:12]} has not trained after 4 of {parent.num_steps} "
        "steps\n"
    )
    wrong = dataclasses.replace(Plan.load(tmp_path / "new"), parent_steps=5)
    wrong.save(tmp_path / "wrong")
    argv[1] = str(tmp_path / "wrong")
    assert main(argv) == 1
    assert "are lost" not in capsys.readouterr().err
    argv[1:3] = [str(tmp_path / "parent"), "--parent"]
    assert main(argv) == 1
    assert "the plan has no parent" in capsys.readouterr().out
    argv[-1] = str(tmp_path / "nothing")
    assert main(argv) == 2
    assert "nothing holds no plan.json; name a folder" in capsys.readouterr().err
