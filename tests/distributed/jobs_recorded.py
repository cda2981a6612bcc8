"""HBP training with everything that went through a step brought back: tokens, losses, gradients."""

import contextlib
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from megatron.training import training as host_training

from megatron_hbp.host import pretrain_gpt
from megatron_hbp.host.forward import ForwardStep
from megatron_hbp.host.training import check_same_plan
from megatron_hbp.plan import Plan
from tests.distributed.jobs import Recorder


def named_weights(model: list[Any]) -> dict[str, torch.Tensor]:
    """Copies of all parameters of this rank, under the names of the stock model."""
    return {
        name: parameter.detach().clone()
        for chunk in unwrap_model(model)
        for name, parameter in chunk.named_parameters()
    }


class StepRecorder(Recorder):
    """Adds to `Recorder`: per micro-batch tokens and losses, gradients before clipping, weights,
    learning rates and FLOPs statistics. Keeps everything in memory: for tiny jobs.
    """

    def __init__(self, weights: str | None, gradients_at: list[int], with_logits: bool) -> None:
        super().__init__()
        self.microbatches: list[dict[str, Any]] = []
        self.gradients_by_step: dict[int, dict[str, torch.Tensor]] = {}
        self._rates: dict[int, float] = {}
        self.seqlen_stats: list[tuple[float, float]] = []
        self.weights_at_evaluation: list[dict[str, torch.Tensor]] = []
        self.weights_at_start: dict[str, torch.Tensor] = {}
        self.model: list[Any] = []
        self._weights = weights
        self._gradients_at = gradients_at
        self._with_logits = with_logits
        self._steps_done = 0
        self._packs: dict[int, Any] = {}
        self._logits: torch.Tensor | None = None
        self._wrap("setup_model_and_optimizer", self._on_setup)
        self._wrap("consume_seqlen_stats_in_iteration", self._on_seqlen_stats)
        self._wrap_forward_step()

    def result(self) -> dict[str, Any]:
        return super().result() | {
            "microbatches": self.microbatches,
            "gradients_by_step": self.gradients_by_step,
            "learning_rates": list(self._rates.values()),
            "seqlen_stats": self.seqlen_stats,
            "weights_at_evaluation": self.weights_at_evaluation,
            "weights_at_start": self.weights_at_start,
            "weights": named_weights(self.model),
        }

    def _on_setup(self, result: Any, *args: Any, **kwargs: Any) -> None:
        self.model, optimizer = result[0], result[1]
        if self._weights is not None:
            weights = torch.load(self._weights)
            for chunk in unwrap_model(self.model):
                for name, parameter in chunk.named_parameters():
                    parameter.data.copy_(weights[name])
            optimizer.reload_model_params()
        self.weights_at_start = named_weights(self.model)
        step = optimizer.step

        def recorded_step(*args: Any, **kwargs: Any) -> Any:
            if self._steps_done in self._gradients_at:
                self.gradients_by_step[self._steps_done] = {
                    name: parameter.main_grad.clone()
                    for chunk in unwrap_model(self.model)
                    for name, parameter in chunk.named_parameters()
                }
            self._steps_done += 1
            return step(*args, **kwargs)

        optimizer.step = recorded_step
        if self._with_logits:
            self.model[-1].module.output_layer.register_forward_hook(self._on_logits)

    def _on_logits(self, module: Any, inputs: Any, output: Any) -> None:
        self._logits = output[0].detach()[:, 0].clone()

    def _on_seqlen_stats(self, result: Any, *args: Any, **kwargs: Any) -> None:
        self.seqlen_stats.append(result)

    def _on_log(self, result: Any, *args: Any, **kwargs: Any) -> None:
        learning_rate, iteration = args[2], args[3]
        self._rates[iteration] = float(learning_rate)  # the first iteration may be logged twice

    def _on_evaluate(self, result: Any, *args: Any, **kwargs: Any) -> None:
        super()._on_evaluate(result, *args, **kwargs)
        self.weights_at_evaluation.append(named_weights(self.model))

    def _wrap_forward_step(self) -> None:
        make_pack, compute_loss = ForwardStep._pack, ForwardStep._loss
        recorder = self

        def recorded_pack(self: Any, item: Any, batch: Any) -> Any:
            recorder._packs[id(item)] = pack = make_pack(self, item, batch)
            return pack

        def recorded_loss(self: Any, item: Any, batch: Any, losses: torch.Tensor) -> Any:
            pack = recorder._packs.pop(id(item))
            result = compute_loss(self, item, batch, losses)
            recorder.microbatches.append(
                {
                    "step": item["step"],
                    "microbatch": item["microbatch"],
                    "level": item["level"],
                    "training": item["training"],
                    "cp_rank": item["cp_rank"],
                    "tokens": item["tokens"][0],
                    "labels": item["labels"][0],
                    "weights": item["loss_weights"],
                    "padding": item["padding_mask"][0],
                    "positions": item["positions"],
                    "bounds": pack.pack_bounds,
                    "max_seqlen": pack.pack_max_seqlen,
                    "rotary_rows": pack.rotary_rows,
                    "losses": losses.detach().view(-1).clone(),
                    "returned": (float(result[0]), int(result[1]), result[1].dtype, len(result)),
                    "logits": recorder._logits,
                }
            )
            return result

        ForwardStep._pack = recorded_pack
        ForwardStep._loss = recorded_loss


def train(
    argv: list[str],
    weights: str | None = None,
    gradients_at: list[int] | None = None,
    with_logits: bool = False,
    with_output: bool = False,
) -> dict[str, Any]:
    """Trains with flags from `weights` (a file of named parameters) or the host's own start."""
    sys.argv = ["pretrain_gpt", *argv]
    recorder = StepRecorder(weights, gradients_at or [], with_logits)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output) if with_output else contextlib.nullcontext():
            pretrain_gpt.main()
    except SystemExit as stop:
        if stop.code:  # not the host's --exit-interval
            return {"error": str(stop)}
    return recorder.result() | {"output": output.getvalue()}


def train_and_die(argv: list[str], log: str, steps: int, victim: int, seconds: float) -> None:
    """Trains; `seconds` after its own file in `log` has got `steps` more steps, a rank kills itself
    with SIGKILL.
    """
    file = Path(log) / f"rank-{victim:05d}.jsonl"
    before = file.read_text().count('"step"') if file.exists() else 0

    def watch() -> None:
        while not file.exists() or file.read_text().count('"step"') < before + steps:
            time.sleep(0.002)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == victim:
        threading.Thread(target=watch, daemon=True).start()
    train(argv)


def printed_error(argv: list[str]) -> dict[str, Any]:
    """How a run that must stop with SystemExit does so: its exit code, and the last line of what
    the process leaves on standard error.
    """
    sys.argv = ["pretrain_gpt", *argv]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            pretrain_gpt.main()
    except SystemExit as stop:
        if isinstance(stop.code, str):  # what Python does with it
            return {"code": 1, "error": stop.code + "\n"}
        lines = errors.getvalue().splitlines(keepends=True)
        return {"code": stop.code, "error": lines[-1] if lines else ""}
    return {"code": 0, "error": ""}


def compare_plans(folders: list[str], training_too: bool) -> dict[str, Any]:
    """What start-up does when rank r holds the plan in folders[r], as its validation plan too."""
    torch.distributed.init_process_group("gloo")
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            plans = [Plan.load(folder) for folder in folders]
            mine = plans[torch.distributed.get_rank()]
            check_same_plan(mine if training_too else plans[0], mine)
    except SystemExit as stop:
        return {"code": stop.code, "error": errors.getvalue()}
    return {"code": 0, "error": ""}


assert hasattr(host_training, "consume_seqlen_stats_in_iteration")
