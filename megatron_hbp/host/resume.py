"""Where a run starts in its plan, from the checkpoint that it loads; a plan that does not fit it is
refused before anything is built.

The state of a run is (plan hash, consumed steps). The hash travels in the host's arguments, which
every checkpoint holds; the steps are the host's consumed samples.

Guarantees (asserted by tests/host/test_resume_start.py and tests/distributed/test_replan.py):
- the same plan goes on with its next step; a plan made by `hbp replan` starts where its parent was
  left, and nowhere else; any other plan is refused, with the command that makes the right one;
- every rank comes to the same verdict, from the same file, without communication.
"""

from dataclasses import dataclass
from typing import Any

from megatron_hbp.host.checkpoint import Checkpoint, checkpoint_to_load
from megatron_hbp.plan import Plan


@dataclass(frozen=True)
class Start:
    """consumed_steps: steps of the plan that are trained; None: the host's count tells after it has
    loaded a checkpoint that could not be read here.

    first_iteration, first_sample: the host's iteration and consumed samples at the plan's first
    step. schedule: the checkpoint's learning-rate schedule, None when there is none to go on with.
    """

    consumed_steps: int | None = 0
    first_iteration: int = 0
    first_sample: int = 0
    schedule: dict[str, Any] | None = None


def find_start(args: Any, plan: Plan) -> Start:
    """Where the run starts; notes the plan in the host's arguments, for its checkpoints.

    args: the host's, validated. Raises ValueError when the checkpoint belongs to another plan.
    """
    checkpoint = checkpoint_to_load(args)
    if checkpoint is None:
        start = Start()
    elif checkpoint.args is None:
        start = Start(None, plan.steps_before, plan.slots_before)
        if args.rank == 0:
            print(
                f"> hbp: WARNING: the plan of {checkpoint.path} cannot be read from its format: "
                "whether this run has the same one is not checked",
                flush=True,
            )
    else:
        start = start_after(checkpoint, plan)
    args.hbp_plan_hash = plan.hash()
    args.hbp_plan_folder = None if plan.folder is None else str(plan.folder)
    args.hbp_plan_steps = plan.num_steps
    args.hbp_first_iteration = start.first_iteration
    args.hbp_first_sample = start.first_sample
    return start


def start_after(checkpoint: Checkpoint, plan: Plan) -> Start:
    """Where `plan` goes on after a checkpoint that could be read. ValueError when it does not."""
    saved = checkpoint.args
    samples = getattr(saved, "consumed_train_samples", 0)
    saved_hash = getattr(saved, "hbp_plan_hash", None)
    if saved_hash is None:
        if samples == 0 and checkpoint.iteration == 0:
            return Start(schedule=checkpoint.schedule)
        raise ValueError(
            f"the checkpoint {checkpoint.path}, iteration {checkpoint.iteration}, names no plan: "
            "it was trained without HBP, and which sequences it has seen is not known; add "
            "--finetune to train the plan from its first step on its weights"
        )
    steps, rest = divmod(samples - saved.hbp_first_sample, saved.global_batch_size)
    if saved_hash == plan.hash() and not rest:
        return Start(steps, saved.hbp_first_iteration, saved.hbp_first_sample, checkpoint.schedule)
    if saved_hash == plan.parent_hash and (steps, rest) == (plan.parent_steps, 0):
        return Start(0, checkpoint.iteration, samples, checkpoint.schedule)
    raise ValueError(_other_plan(checkpoint, plan, saved_hash, steps))


def consumed_steps(args: Any, plan: Plan, start: Start) -> int:
    """Steps of the plan that are trained, from the host's count once it has loaded.

    Raises ValueError when these are not whole steps, or not those that the checkpoint had.
    """
    samples = args.consumed_train_samples - start.first_sample
    steps, rest = divmod(samples, plan.slots_per_step)
    if rest or steps < 0:
        raise ValueError(
            f"{args.consumed_train_samples} samples are consumed, the plan starts at "
            f"{start.first_sample} and has {plan.slots_per_step} a step: the checkpoint belongs to "
            "another plan; go on with its plan, or make the rest of it with `hbp replan`"
        )
    if start.consumed_steps not in (None, steps):
        raise ValueError(
            f"the checkpoint had {start.consumed_steps} steps of the plan when the run started and "
            f"has {steps} now: another run writes to --load {args.load}; give each its own folder"
        )
    return steps


def _other_plan(checkpoint: Checkpoint, plan: Plan, saved_hash: str, steps: int) -> str:
    folder = getattr(checkpoint.args, "hbp_plan_folder", None) or "OLD_PLAN"
    stages = f" --stages {plan.num_stages}" if plan.num_stages > 1 else ""
    if plan.num_virtual_stages > 1:
        stages += f" --virtual-stages {plan.num_virtual_stages}"
    command = (
        f"`hbp replan {folder} --consumed {steps} --ranks {plan.num_ranks} --microbatches "
        f"{plan.num_microbatches}{stages} --output DIR` and --hbp-plan DIR"
    )
    if saved_hash == plan.parent_hash:
        return (
            f"the plan {plan.hash()[:12]} continues {saved_hash[:12]} after step "
            f"{plan.parent_steps}, the checkpoint {checkpoint.path} stands at step {steps}: go on "
            f"with {command}, or load the checkpoint of step {plan.parent_steps} with --ckpt-step"
        )
    return (
        f"the checkpoint {checkpoint.path} stands at step {steps} of plan {saved_hash[:12]} "
        f"({folder}), this run has plan {plan.hash()[:12]}: go on with --hbp-plan {folder} where "
        f"ranks and micro-batches are the same, else with {command}, or start over with --finetune"
    )
