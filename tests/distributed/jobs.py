"""What the ranks of a test job run. Imported in forked processes only."""

import sys
from typing import Any

import torch
from megatron.training import training as host_training

from megatron_hbp.host import pretrain_gpt


class Recorder:
    """Reads the host's numbers in-process, at full precision (its log rounds and averages)."""

    def __init__(self, with_gradients: bool = False) -> None:
        self.losses: list[dict[str, float]] = []
        self.gradient_norms: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.evaluations: list[dict[str, float]] = []
        self.args: Any = None
        self._with_gradients = with_gradients
        self._wrap("training_log", self._on_log)
        self._wrap("train_step", self._on_step)
        self._wrap("evaluate", self._on_evaluate)

    def _wrap(self, name: str, handler: Any) -> None:
        original = getattr(host_training, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            handler(result, *args, **kwargs)
            return result

        setattr(host_training, name, wrapper)

    def _on_log(self, result: Any, loss_dict: dict, *args: Any, **kwargs: Any) -> None:
        pass

    def _on_evaluate(self, result: Any, *args: Any, **kwargs: Any) -> None:
        self.evaluations.append({k: float(v) for k, v in result[0].items()})

    def _on_step(self, result: Any, forward: Any, iterator: Any, model: Any, *args: Any, **kw: Any):
        loss, gradient_norm = result[0], result[5]
        self.losses.append({k: float(v) for k, v in loss.items()})
        self.gradient_norms.append(float(gradient_norm))
        if self._with_gradients and not self.gradients:
            for chunk in model:
                for name, parameter in chunk.named_parameters():
                    self.gradients[name.removeprefix("module.")] = parameter.main_grad.clone()

    def result(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "gradient_norms": self.gradient_norms,
            "gradients": self.gradients,
            "evaluations": self.evaluations,
        }


def train(argv: list[str], with_gradients: bool = False) -> dict[str, Any]:
    """Runs the entry point with flags; its clear errors come back as {"error": text}."""
    sys.argv = ["pretrain_gpt", *argv]
    recorder = Recorder(with_gradients)
    try:
        pretrain_gpt.main()
    except SystemExit as stop:
        return {"error": str(stop)}
    return recorder.result()
