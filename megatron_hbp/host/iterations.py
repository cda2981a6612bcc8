"""How many steps a run has, and how long its learning-rate schedule is.

The host counts steps in iterations and the schedule in samples, which are rank slots here. A plan
that continues another one has other steps: what the user left open is set so that the rate reaches
its minimum at the plan's last step, and what the host would refuse with a bare assertion is refused
here, with the flag that it needs.
"""

from typing import Any

from megatron_hbp.host.resume import Start
from megatron_hbp.plan import Plan

_HOST_EVAL_ITERS = 100  # the host's default: not a choice of the user's
_OVERRIDE = "--override-opt_param-scheduler"


def set_iterations(
    args: Any, plan: Plan, valid_plan: Plan | None, start: Start | None = None
) -> None:
    """Steps from the plan where the user named none; an error where the two contradict.

    start: where the run starts in the plan (None: at its first step, as the host's).
    """
    start = start or Start()
    last = start.first_iteration + plan.num_steps
    if args.train_iters is None:
        args.train_iters = last
    after = f", which start at iteration {start.first_iteration}" if start.first_iteration else ""
    _require(
        args.train_iters <= last,
        f"--train-iters {args.train_iters} is beyond the plan's {plan.num_steps} steps "
        f"({plan.epochs} epochs){after}; raise --hbp-epochs or leave --train-iters out",
    )
    if start.first_sample and args.lr_decay_iters is None:
        steps = args.train_iters - start.first_iteration
        args.lr_decay_iters = start.first_sample // plan.slots_per_step + steps
    decay_iters = args.lr_decay_iters or args.train_iters
    _require(
        args.lr_warmup_iters < decay_iters,
        f"--lr-warmup-iters {args.lr_warmup_iters} is not below the {decay_iters} steps of the "
        "learning-rate schedule (the plan's, unless --train-iters or --lr-decay-iters says so); "
        "lower it, or use --lr-warmup-fraction",
    )
    steps = valid_plan.num_steps if valid_plan is not None else 0
    _require(
        args.eval_iters in (None, _HOST_EVAL_ITERS, 0, steps),
        f"--eval-iters is {args.eval_iters}; the validation corpus takes {steps} evaluation steps, "
        "all of it each time; leave --eval-iters out",
    )
    args.eval_iters = steps
    if args.eval_interval is None:  # the host divides by it all the same; now no step is a multiple
        args.eval_interval = args.train_iters + 1
    if start.schedule is not None and not args.no_load_optim:
        _check_schedule(args, plan.slots_per_step, start, start.schedule)


def _check_schedule(args: Any, batch: int, start: Start, saved: dict[str, Any]) -> None:
    """The schedule, in samples, against the checkpoint's."""
    continues = start.first_sample > 0
    decay = (args.lr_decay_iters or args.train_iters) * batch
    warmup = args.lr_warmup_iters * batch
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    elif continues and not args.use_checkpoint_opt_param_scheduler:
        _require(
            abs(warmup - saved["lr_warmup_steps"]) < batch,
            f"--lr-warmup-iters {args.lr_warmup_iters} is {warmup} samples at --global-batch-size "
            f"{batch}, the checkpoint's learning rate warms up over {saved['lr_warmup_steps']}; "
            f"use --lr-warmup-iters {round(saved['lr_warmup_steps'] / batch)}",
        )
    _require(
        args.weight_decay_incr_style == "constant"
        or start.first_sample == start.first_iteration * batch,
        f"--weight-decay-incr-style {args.weight_decay_incr_style} is not supported after a change "
        "of --global-batch-size: the host counts its length in samples, as if all steps had the "
        "new size; use constant",
    )
    if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
        return
    for what, ours, name in (
        ("decays over", decay, "lr_decay_steps"),
        ("warms up over", warmup, "lr_warmup_steps"),
        ("and weight decay are set for", args.train_iters * batch, "wd_incr_steps"),
    ):
        if ours == saved[name]:
            continue
        if continues and start.consumed_steps == 0:
            raise ValueError(
                f"{_OVERRIDE} is missing: the plan continues another one with other steps, so the "
                f"learning rate {what} {ours} samples, in the checkpoint {saved[name]}; add the "
                "flag: the rate then reaches its minimum at the plan's last step"
            )
        raise ValueError(
            f"the learning rate {what} {ours} samples, in the checkpoint {saved[name]}; give the "
            f"flags of the run that saved it, or {_OVERRIDE} to change them"
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
