"""Where a run starts in its plan, for every checkpoint that there can be."""

import io
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs the extra [train]")

import torch
import torch.distributed.checkpoint
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from megatron_hbp.host.checkpoint import Checkpoint, check_weights, checkpoint_to_load
from megatron_hbp.host.iterations import set_iterations
from megatron_hbp.host.resume import Start, consumed_steps, find_start, start_after
from megatron_hbp.level import Level
from megatron_hbp.planner import build_plan
from megatron_hbp.replan import replan

PARENT = build_plan(np.full(96, 64), [Level(64, 1)], 4, 2)  # 12 steps of 8 slots
PLAN = replan(PARENT, 5, num_ranks=2)  # 14 steps of 4 slots, from slot 40 on
SCHEDULE = {"lr_decay_steps": 96, "lr_warmup_steps": 16, "wd_incr_steps": 96}


def _checkpoint(plan=PARENT, steps=5, *, sample=0, iteration=0, batch=None, **changes):
    """As the host saves it after `steps` steps of a plan that began at a sample and iteration."""
    batch = batch or plan.slots_per_step
    args = {
        "consumed_train_samples": sample + steps * batch,
        "global_batch_size": batch,
        "hbp_plan_hash": plan.hash(),
        "hbp_plan_folder": "/plans/old",
        "hbp_first_sample": sample,
        "hbp_first_iteration": iteration,
    }
    return Checkpoint("/ckpt", iteration + steps, Namespace(**args | changes), SCHEDULE)


def test_the_same_plan_goes_on():
    for steps in range(PARENT.num_steps + 1):
        assert start_after(_checkpoint(steps=steps), PARENT) == Start(steps, 0, 0, SCHEDULE)
    saved = _checkpoint(PLAN, 3, sample=40, iteration=5)
    assert start_after(saved, PLAN) == Start(3, 5, 40, SCHEDULE)
    # the plan was begun with --finetune, so the host counts from 0
    assert start_after(_checkpoint(PLAN, 3), PLAN) == Start(3, 0, 0, SCHEDULE)


def test_a_replanned_run_starts_where_its_parent_was_left():
    assert start_after(_checkpoint(), PLAN) == Start(0, 5, 40, SCHEDULE)
    third = replan(PLAN, 2, num_ranks=8)
    saved = _checkpoint(PLAN, 2, sample=40, iteration=5)
    assert start_after(saved, third) == Start(0, 7, 48, SCHEDULE)
    with pytest.raises(ValueError, match="this run has plan"):  # a step of the grandparent
        start_after(_checkpoint(), third)


@pytest.mark.parametrize("steps", [0, 4, 6, 12])
def test_another_step_of_the_parent_is_refused(steps):
    with pytest.raises(
        ValueError,
        match=f"the plan {PLAN.hash()[:12]} continues {PARENT.hash()[:12]} after step 5, the "
        f"checkpoint /ckpt stands at step {steps}: go on with `hbp replan /plans/old --consumed "
        f"{steps} --ranks 2 --microbatches 2 --output DIR` and --hbp-plan DIR, or load the "
        "checkpoint of step 5 with --ckpt-step",
    ):
        start_after(_checkpoint(steps=steps), PLAN)


def test_another_plan_is_refused_with_the_command_that_helps():
    other = build_plan(np.full(96, 64), [Level(64, 1)], 4, 4, 2, num_virtual_stages=2, seed=7)
    with pytest.raises(
        ValueError,
        match=f"the checkpoint /ckpt stands at step 5 of plan {PARENT.hash()[:12]} "
        rf"\(/plans/old\), this run has plan {other.hash()[:12]}: go on with --hbp-plan /plans/old "
        "where ranks and micro-batches are the same, else with `hbp replan /plans/old --consumed 5 "
        "--ranks 4 --microbatches 4 --stages 2 --virtual-stages 2 --output DIR`",
    ):
        start_after(_checkpoint(), other)
    with pytest.raises(ValueError, match="hbp replan OLD_PLAN --consumed 5"):
        start_after(_checkpoint(hbp_plan_folder=None), other)


def test_a_checkpoint_that_names_no_plan():
    stock = Namespace(consumed_train_samples=16)
    with pytest.raises(
        ValueError, match=r"the checkpoint /ckpt, iteration 2, names no plan: .* add --finetune"
    ):
        start_after(Checkpoint("/ckpt", 2, stock), PLAN)
    with pytest.raises(ValueError, match="names no plan"):
        start_after(Checkpoint("/ckpt", 2, Namespace()), PLAN)
    # a converted checkpoint has trained nothing
    assert start_after(Checkpoint("/ckpt", 0, Namespace()), PLAN) == Start()


def test_the_host_must_have_loaded_what_was_read():
    args = Namespace(consumed_train_samples=52, load="/ckpt")
    assert consumed_steps(args, PLAN, Start(3, 5, 40)) == 3
    assert consumed_steps(args, PLAN, Start(None, 5, 40)) == 3
    with pytest.raises(ValueError, match=r"had 2 steps of the plan .* has 3 now: another run"):
        consumed_steps(args, PLAN, Start(2, 5, 40))
    for samples in (53, 39):
        args.consumed_train_samples = samples
        with pytest.raises(ValueError, match=f"{samples} samples are consumed, .* starts at 40 an"):
            consumed_steps(args, PLAN, Start(None, 5, 40))


def _args(folder: Path | None, **changes):
    settings = {
        "rank": 0,
        "finetune": False,
        "load": None if folder is None else str(folder),
        "non_persistent_ckpt_type": None,
        "non_persistent_global_ckpt_dir": None,
        "auto_detect_ckpt_format": False,
        "ckpt_format": "torch_dist",
        "ckpt_step": None,
        "pretrained_checkpoint": None,
    }
    return Namespace(**settings | changes)


def _save(folder: Path, steps: int) -> None:
    """What the host reads first of each of its checkpoints, in the host's format."""
    state = {"iteration": steps, "args": _checkpoint(steps=steps).args}
    content = io.BytesIO()
    torch.save([state | {"opt_param_scheduler": SCHEDULE}], content)
    key = ShardedObject("common_state", None, (1,), (0,)).unique_key
    path = folder / f"iter_{steps:07d}"
    path.mkdir(parents=True)
    torch.distributed.checkpoint.save({key: content}, checkpoint_id=path, no_dist=True)
    save_config(CheckpointingConfig("torch_dist"), str(path))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(steps))


def test_the_checkpoint_is_read_as_the_host_chooses_it(tmp_path):
    assert checkpoint_to_load(_args(None)) is None
    assert checkpoint_to_load(_args(tmp_path / "nothing")) is None
    _save(tmp_path, 5)
    _save(tmp_path, 6)
    found = checkpoint_to_load(_args(tmp_path))
    assert (found.path, found.iteration) == (str(tmp_path / "iter_0000006"), 6)
    assert found.schedule == SCHEDULE
    assert checkpoint_to_load(_args(tmp_path, ckpt_step=5)).iteration == 5
    assert checkpoint_to_load(_args(tmp_path, finetune=True)) is None
    _save(tmp_path / "non_persistent", 7)
    assert checkpoint_to_load(_args(tmp_path)).iteration == 6
    globally = {"non_persistent_ckpt_type": "global"}
    assert checkpoint_to_load(_args(tmp_path, **globally)).iteration == 7
    _save(tmp_path / "elsewhere", 4)
    globally["non_persistent_global_ckpt_dir"] = str(tmp_path / "elsewhere")
    assert checkpoint_to_load(_args(tmp_path, **globally)).iteration == 6
    assert checkpoint_to_load(_args(tmp_path / "nothing", **globally)).iteration == 4


def test_the_plan_is_noted_for_the_next_checkpoint(tmp_path):
    _save(tmp_path, 5)
    args = _args(tmp_path)
    assert find_start(args, PLAN) == Start(0, 5, 40, SCHEDULE)
    assert args.hbp_plan_hash == PLAN.hash()
    assert (args.hbp_first_iteration, args.hbp_first_sample) == (5, 40)
    assert args.hbp_plan_folder is None
    PLAN.save(tmp_path / "plan")
    args = _args(None)
    assert find_start(args, type(PLAN).load(tmp_path / "plan")) == Start()
    assert args.hbp_plan_folder == str(tmp_path / "plan")


def test_a_format_that_is_not_read_is_said(tmp_path, capsys):
    _save(tmp_path, 5)
    for changes in ({"ckpt_format": "torch"}, {"non_persistent_ckpt_type": "local"}):
        start = find_start(_args(tmp_path, **changes), PLAN)
        assert start == Start(None, PLAN.steps_before, PLAN.slots_before)
        assert "is not checked" in capsys.readouterr().out
        find_start(_args(tmp_path, rank=1, **changes), PLAN)
        assert capsys.readouterr().out == ""


def test_a_damaged_checkpoint_is_named(tmp_path):
    _save(tmp_path, 5)
    for file in (tmp_path / "iter_0000005").glob("*.distcp"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"iter_0000005 cannot be read .*--ckpt-step"):
        checkpoint_to_load(_args(tmp_path))


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    """The host would end with exit code 0 on a tracker it cannot read, as if all were trained."""
    _save(tmp_path, 5)
    with pytest.raises(ValueError, match=r"--ckpt-step names .*iter_0000004, which is not there"):
        checkpoint_to_load(_args(tmp_path, ckpt_step=4))
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("6")
    with pytest.raises(ValueError, match=r"iteration.txt names .*iter_0000006, which is not there"):
        checkpoint_to_load(_args(tmp_path))
    for text in ("", "x", "-1"):
        tracker.write_text(text)
        with pytest.raises(ValueError, match=r"iteration.txt names no iteration; write the number"):
            checkpoint_to_load(_args(tmp_path))


def test_weights_are_where_the_host_looks_or_the_run_ends(tmp_path):
    weights, checkpoints = tmp_path / "weights", tmp_path / "checkpoints"
    _save(weights, 0)
    first = _args(checkpoints, pretrained_checkpoint=str(weights))
    check_weights(first)
    assert checkpoint_to_load(first) is None
    for given in (tmp_path / "nothing", weights / "iter_0000000"):
        with pytest.raises(ValueError, match=r"neither --load .* nor .* the folder above iter_"):
            check_weights(_args(checkpoints, pretrained_checkpoint=str(given)))
    (weights / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ValueError, match=r"weights/latest_.* names .*iter_0000007, which is not"):
        check_weights(first)
    with pytest.raises(ValueError, match=r"--finetune without a checkpoint in --load .* random"):
        check_weights(_args(checkpoints, finetune=True))
    check_weights(_args(checkpoints))  # from the host's own start
    check_weights(_args(None))
    _save(checkpoints, 5)  # once there is a checkpoint of the run, the weights may be gone
    check_weights(_args(checkpoints, pretrained_checkpoint=str(tmp_path / "nothing")))
    check_weights(_args(checkpoints, finetune=True))


def _schedule(**changes):
    settings = {
        "eval_iters": 0,
        "eval_interval": 1,
        "train_iters": None,
        "lr_decay_iters": None,
        "lr_warmup_iters": 4,
        "lr_warmup_fraction": None,
        "no_load_optim": False,
        "weight_decay_incr_style": "constant",
        "override_opt_param_scheduler": True,
        "use_checkpoint_opt_param_scheduler": False,
    }
    return Namespace(**settings | changes)


def test_the_schedule_ends_with_the_plan():
    args = _schedule()
    set_iterations(args, PLAN, None, Start(0, 5, 40, SCHEDULE))
    assert args.train_iters == 5 + PLAN.num_steps
    assert args.lr_decay_iters * 4 == 40 + 4 * PLAN.num_steps
    # 40 slots are 2 steps of 16 and a half: at the last step, within one step
    wide = replan(PARENT, 5, num_ranks=8)
    args = _schedule(lr_warmup_iters=1)
    set_iterations(args, wide, None, Start(0, 5, 40, SCHEDULE))
    end = 40 + 16 * wide.num_steps
    assert end - 16 < args.lr_decay_iters * 16 <= end
    args = _schedule(lr_decay_iters=9, train_iters=8)
    set_iterations(args, PLAN, None, Start(0, 5, 40, SCHEDULE))
    assert (args.lr_decay_iters, args.train_iters) == (9, 8)
    args = _schedule(override_opt_param_scheduler=False, lr_warmup_iters=2)
    set_iterations(args, PARENT, None, Start(5, 0, 0, SCHEDULE))
    assert (args.lr_decay_iters, args.train_iters) == (None, 12)


@pytest.mark.parametrize(
    ("changes", "start", "text"),
    [
        (
            {"override_opt_param_scheduler": False},
            Start(0, 5, 40, SCHEDULE),
            "--override-opt_param-scheduler is missing: .* decays over 96 samples, in the "
            "checkpoint 100; add the flag",
        ),
        (
            {"override_opt_param_scheduler": False},
            Start(3, 5, 40, SCHEDULE),
            "the learning rate decays over 96 samples, in the checkpoint 100; give the flags",
        ),
        (
            {"lr_warmup_iters": 2},
            Start(0, 5, 40, SCHEDULE),
            "--lr-warmup-iters 2 is 8 samples at --global-batch-size 4, the checkpoint's learning "
            "rate warms up over 16; use --lr-warmup-iters 4",
        ),
        (
            {"weight_decay_incr_style": "linear"},
            Start(0, 5, 40, SCHEDULE),
            "--weight-decay-incr-style linear is not supported after a change of --global-batch",
        ),
        (
            {"train_iters": 20},
            Start(0, 5, 40, SCHEDULE),
            r"--train-iters 20 is beyond the plan's 14 steps \(1 epochs\), which start at iter",
        ),
    ],
)
def test_schedules_that_the_host_would_not_take(changes, start, text):
    start = Start(start.consumed_steps, 5, 40, SCHEDULE | {"lr_decay_steps": 100})
    with pytest.raises(ValueError, match=text):
        set_iterations(_schedule(**changes), PLAN, None, start)


def test_schedules_that_are_the_users():
    """Asked for, or not loaded at all: nothing to refuse."""
    other = Start(0, 5, 40, SCHEDULE | {"lr_decay_steps": 100})
    for changes in (
        {},
        {"no_load_optim": True, "override_opt_param_scheduler": False, "lr_warmup_iters": 1},
        {
            "use_checkpoint_opt_param_scheduler": True,
            "override_opt_param_scheduler": False,
            "lr_warmup_iters": 1,
        },
        {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 0},
    ):
        set_iterations(_schedule(**changes), PLAN, None, other)
    set_iterations(_schedule(lr_warmup_iters=1), PLAN, None, Start(0, 5, 40))
