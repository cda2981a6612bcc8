"""The verdict on a run that was killed and resumed, from its step log."""

import json
import re

import numpy as np
import pytest

from megatron_hbp.level import Level
from megatron_hbp.planner import build_plan
from megatron_hbp.rehearsal.verdict import judge

RANKS, MICROBATCHES = 2, 2
SAVED, KILLED = 3, 5  # steps


@pytest.fixture(scope="module")
def plan():
    lengths = np.array([30, 17, 5, 60, 9, 24, 50, 11] * 12, dtype=np.int32)
    return build_plan(lengths, [Level(32, 1), Level(64, 2)], RANKS, num_microbatches=MICROBATCHES)


def log_of(plan) -> list[list[dict]]:
    """Lines of both ranks of a run that did everything right."""
    files = []
    for rank in range(RANKS):
        lines = []
        for start, end in ((0, KILLED), (SAVED, plan.num_steps)):
            lines.append({"plan": plan.hash()[:12], "start": start, "rank": rank})
            lines += [_step(plan, step, rank) for step in range(start, end)]
        files.append(lines)
    return files


def _step(plan, step: int, rank: int) -> dict:
    microbatches = []
    for at in range(step * MICROBATCHES, (step + 1) * MICROBATCHES):
        level = plan.levels[plan.microbatch_level[at]]
        pack, cp_rank = plan.pack_index(at, rank)
        ids = plan.pack(pack).tolist() if cp_rank == 0 else []  # named by one of the ranks
        microbatches.append(
            {
                "level": str(level),
                "cp_size": level.cp_size,
                "loss_sum": 5.0 + at / 7 + rank,
                "trained_tokens": 10,
                "sequences": ids,
            }
        )
    return {"plan": plan.hash()[:12], "step": step, "rank": rank, "microbatches": microbatches}


def pack_trained(plan) -> np.ndarray:
    """Each rank of those that share a pack trains 10 tokens."""
    return np.array([10 * plan.levels[level].cp_size for level in plan.pack_level()])


def write(folder, files):
    folder.mkdir()
    for rank, lines in enumerate(files):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"rank-{rank:05d}.jsonl").write_text(text)


def judged(folder, plan, files):
    write(folder, files)
    return judge(folder, plan, pack_trained(plan))


def test_passed(plan, tmp_path):
    verdict = judged(tmp_path / "log", plan, log_of(plan))
    assert verdict.problems == []
    assert verdict.passed
    assert verdict.steps == verdict.planned_steps == plan.num_steps > KILLED
    assert verdict.resumed_at == SAVED
    assert verdict.repeated_steps == list(range(SAVED, KILLED))
    counts = np.bincount(plan.microbatch_level, minlength=2).tolist()
    assert verdict.microbatches == {1: counts[0], 2: counts[1]}
    assert len(verdict.losses) == plan.num_steps
    first = np.mean([5.0 + at / 7 + rank for at in range(MICROBATCHES) for rank in range(RANKS)])
    assert verdict.losses[0] == pytest.approx(first / 10)


def _change(lines, step, run, **values):
    starts = [place for place, line in enumerate(lines) if "start" in line]
    line = next(line for line in lines[starts[run] :] if line.get("step") == step)
    line["microbatches"][0] |= values


def other_loss(plan, files):
    before = _step(plan, SAVED, 1)["microbatches"][0]["loss_sum"]
    _change(files[1], SAVED, 1, loss_sum=np.nextafter(before, 9.0))


def not_a_number(plan, files):
    _change(files[0], 1, 0, loss_sum=float("nan"))


def other_sequences(plan, files):
    _change(files[0], plan.num_steps - 1, 1, sequences=[0])


def not_to_the_end(plan, files):
    for lines in files:
        lines.pop()


def started_over(plan, files):
    for rank, lines in enumerate(files):
        del lines[KILLED + 1 :]
        lines.append({"plan": plan.hash()[:12], "start": 0, "rank": rank})
        lines += [_step(plan, step, rank) for step in range(plan.num_steps)]


def killed_too_early(plan, files):
    for lines in files:
        del lines[SAVED + 1 : KILLED + 1]


def never_restarted(plan, files):
    for rank, lines in enumerate(files):
        del lines[1:]
        lines += [_step(plan, step, rank) for step in range(plan.num_steps)]


def one_level_only(plan, files):
    for lines in files:
        for line in lines:
            for microbatch in line.get("microbatches", []):
                microbatch["cp_size"] = 1


def other_cp_size(plan, files):
    _change(files[1], SAVED, 1, cp_size=3)


def other_tokens(plan, files):
    """The log's ids are the plan's whatever was read: tokens are counted from the batch."""
    _change(files[1], plan.num_steps - 1, 1, trained_tokens=9)


def a_rank_that_logged_nothing(plan, files):
    files.pop()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_loss, r"rank-00001.jsonl: step 3 has losses .* before the kill .* bit for bit"),
        (not_a_number, r"rank-00000.jsonl: the loss of step 1 is not finite"),
        (other_sequences, r"step \d+, micro-batch 0: .* sequences of the plan are not logged"),
        (not_to_the_end, r"\d+ of the plan's \d+ steps were trained"),
        (started_over, r"started at step 0: it did not find the checkpoint.*--load.*--finetune"),
        (killed_too_early, r"no step was trained by both runs"),
        (never_restarted, r"0 restarts were logged, there must be 1"),
        (other_cp_size, r"rank-00001.jsonl: step 3, micro-batch 0 of level .* with CP size 3"),
        (other_tokens, r"step \d+, micro-batch 0: \d?9 tokens of pack \d+ .* corpus has \d0 for"),
        (a_rank_that_logged_nothing, r"ranks \[1\] logged nothing"),
        (one_level_only, r"no micro-batch of level 64:2 was trained"),
    ],
)
def test_failed(plan, tmp_path, spoil, message):
    files = log_of(plan)
    spoil(plan, files)
    verdict = judged(tmp_path / "log", plan, files)
    assert not verdict.passed
    text = "\n".join(verdict.problems)
    assert re.search(message, text), text


def test_a_line_cut_off_by_the_kill_is_passed_over(plan, tmp_path):
    files = log_of(plan)
    verdict = judged(tmp_path / "whole", plan, files)
    folder = tmp_path / "torn"
    folder.mkdir()
    for rank, lines in enumerate(files):
        text = [json.dumps(line) for line in lines]
        text[KILLED + 1 : KILLED + 1] = [text[KILLED][:40]]
        (folder / f"rank-{rank:05d}.jsonl").write_text("\n".join(text) + "\n")
    assert judge(folder, plan, pack_trained(plan)) == verdict


def test_weights_that_were_not_loaded(plan, tmp_path):
    files = log_of(plan)
    write(tmp_path / "log", files)
    write(tmp_path / "weights", [lines[:2] for lines in files])
    assert judge(tmp_path / "log", plan, pack_trained(plan), tmp_path / "weights").passed
    write(tmp_path / "nothing", [])
    _change(files[1], 0, 0, loss_sum=4.0)
    write(tmp_path / "others", [lines[:2] for lines in files])
    for folder, name in (("others", "rank-00001"), ("nothing", "rank-00000")):
        problems = judge(tmp_path / "log", plan, pack_trained(plan), tmp_path / folder).problems
        assert problems[0].startswith(f"{name}.jsonl: step 0 has losses")
        assert "--pretrained-checkpoint: they were not loaded" in problems[0]
