"""A run's step log against its plan: as it is after kills and restarts, and as it must not be."""

import json
import shutil

import numpy as np
import pytest

from megatron_hbp import Level, build_plan
from megatron_hbp.cli import main
from megatron_hbp.trained import trained_steps

LENS = np.random.default_rng(0).integers(2, 64, 150)
RANKS, MICROBATCHES = 4, 2


@pytest.fixture(scope="module")
def plan():
    lens = np.concatenate([LENS, [100, 120, 70]])
    return build_plan(lens, [Level(64, 1), Level(128, 2)], RANKS, MICROBATCHES, epochs=2)


def _entry(plan, rank, step):
    microbatches = []
    for m in range(step * MICROBATCHES, (step + 1) * MICROBATCHES):
        pack, cp_rank = plan.pack_index(m, rank)
        microbatches.append({"sequences": [] if cp_rank else plan.pack(pack).tolist()})
    return {"plan": plan.hash()[:12], "step": step, "microbatches": microbatches}


def _start(plan, step):
    return {"plan": plan.hash()[:12], "start": step}


def _run(plan, *processes):
    """Per rank the lines of processes (first step, steps that the rank logged)."""
    return [
        [
            line
            for first, ends in processes
            for line in [
                _start(plan, first),
                *(_entry(plan, rank, step) for step in range(first, ends[rank % len(ends)])),
            ]
        ]
        for rank in range(RANKS)
    ]


def _write(folder, ranks):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for rank, lines in enumerate(ranks):
        text = "".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines)
        (folder / f"rank-{rank:05d}.jsonl").write_text(text)
    return str(folder)


def _trained(folder, plan, ranks):
    found = trained_steps(_write(folder / "log", ranks), plan)
    return found.steps, found.restarts, found.problems


def test_a_whole_run(plan, tmp_path):
    assert plan.num_steps > 12
    steps = plan.num_steps
    assert _trained(tmp_path, plan, _run(plan, (0, [steps]))) == (steps, 0, [])


def test_a_killed_run_that_went_on(plan, tmp_path):
    """Ranks logged up to other steps; the restart went back to step 6 and was killed at once."""
    ranks = _run(plan, (0, [9, 8]), (6, [6, 7]), (6, [12]))
    assert _trained(tmp_path, plan, ranks) == (12, 2, [])
    assert _trained(tmp_path, plan, _run(plan, (0, [9, 8]))) == (8, 0, [])
    # what was logged before the restart does not count once it has gone back
    assert _trained(tmp_path, plan, _run(plan, (0, [9]), (6, [7]))) == (7, 1, [])
    assert _trained(tmp_path, plan, _run(plan, (0, [9]), (6, [6]))) == (6, 1, [])


def test_a_line_that_a_kill_cut_is_passed_over(plan, tmp_path):
    ranks = _run(plan, (0, [5]), (3, [8]))
    ranks[1].insert(6, '{"plan": "abc", "ste\n')
    ranks[2].append('{"plan"')
    assert _trained(tmp_path, plan, ranks) == (8, 1, [])
    ranks[3].insert(3, "{}\n")
    assert _trained(tmp_path, plan, ranks)[2] == ["rank-00003.jsonl line 4 is damaged"]


def test_a_step_run_again_at_once_counts_once(plan, tmp_path):
    ranks = _run(plan, (0, [5]))
    for lines in ranks:
        lines.insert(4, lines[3])
    assert _trained(tmp_path, plan, ranks) == (5, 0, [])


def test_lines_of_other_plans_are_left_alone(plan, tmp_path):
    other = build_plan(LENS, [Level(64, 1)], RANKS, MICROBATCHES)
    mine, theirs = _run(plan, (0, [5])), _run(other, (0, [7]))
    ranks = [a + b for a, b in zip(mine, theirs, strict=True)]
    assert _trained(tmp_path, plan, ranks) == (5, 0, [])
    assert _trained(tmp_path, other, ranks) == (7, 0, [])


def test_what_must_not_be_is_found(plan, tmp_path):
    def problem(change):
        ranks = _run(plan, (0, [6]))
        change(ranks)
        problems = _trained(tmp_path, plan, ranks)[2]
        assert problems
        return problems[0]

    lost = plan.pack(plan.pack_index(4, 0)[0]).tolist()[0]
    # a sequence of step 2 was not trained, or was twice
    assert problem(lambda ranks: ranks[0][3]["microbatches"][0]["sequences"].remove(lost)) == (
        f"step 2, micro-batch 0: 1 sequences of the plan are not logged [{lost}], 0 are logged "
        "that are not planned []"
    )
    assert problem(lambda ranks: ranks[1][3]["microbatches"][0]["sequences"].append(lost)) == (
        "step 2, micro-batch 0: 0 sequences of the plan are not logged [], 1 are logged that are "
        f"not planned [{lost}]"
    )
    # a step is missing on all ranks, or came again without a restart
    assert problem(lambda ranks: [lines.pop(3) for lines in ranks]) == (
        "rank-00000.jsonl line 4: step 3 follows step 1 without a restart"
    )
    assert problem(lambda ranks: [lines.insert(5, lines[2]) for lines in ranks]) == (
        "rank-00000.jsonl line 6: step 1 follows step 3 without a restart"
    )
    # the log was off for some steps
    assert problem(lambda ranks: [lines.append(_start(plan, 8)) for lines in ranks]) == (
        "rank-00000.jsonl line 8: the run goes on at step 8, steps 6 to 7 are not logged"
    )
    # lines that no run of ours writes
    for change in (
        {"step": "2"},
        {"step": -1},
        {"microbatches": 5},
        {"microbatches": [5, 5]},
        {"microbatches": [{}, {}]},
        {"microbatches": [{"sequences": ["0"]}, {"sequences": []}]},
        {"start": "0"},
        {"start": -5},
    ):
        line = "rank-00001.jsonl line 4 is damaged"
        assert problem(lambda ranks, change=change: ranks[1][3].update(change)) == line
    # a rank's file is gone
    assert "sequences of the plan are not logged" in problem(lambda ranks: ranks.pop(0))


def test_what_is_no_log_of_the_plan(plan, tmp_path):
    with pytest.raises(ValueError, match=r"holds no rank-\*.jsonl; name the folder given to --hbp"):
        trained_steps(tmp_path, plan)
    other = build_plan(LENS, [Level(64, 1)], RANKS, MICROBATCHES)
    folder = _write(tmp_path / "log", _run(other, (0, [3])))
    with pytest.raises(ValueError, match=f"holds no line of plan {plan.hash()[:12]}; name the"):
        trained_steps(folder, plan)


def test_hbp_audit_reads_the_log(plan, tmp_path, capsys):
    plan.save(tmp_path / "plan")
    end = int(plan.epoch_offsets[1])
    ranks = _run(plan, (0, [end + 1]))
    argv = ["audit", str(tmp_path / "plan"), "--step-log", _write(tmp_path / "log", ranks)]
    assert main(argv) == 0
    done = sum(len(m["sequences"]) for lines in ranks for m in lines[-1]["microbatches"])
    assert capsys.readouterr().out.endswith(
        f"good: steps 1 to {end + 1} of {plan.num_steps} trained as planned, 0 restarts; epoch 0: "
        f"153 of 153 sequences, epoch 1: {done} of 153 sequences\n"
    )
    del ranks[2][1:3]
    _write(tmp_path / "log", ranks)
    assert main(argv) == 1
    assert "rank-00002.jsonl line 2: step 2 follows step -1" in capsys.readouterr().out
