"""A recipe scaled down to a few CPU processes, and everything that was changed for it.

Guarantees (asserted by tests/unit/test_rehearsal_scale.py): those of scaling.py, scale_layout.py,
scale_model.py and cpu_limits.py; the same recipe gives the same flags.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hbp.level import Level
from megatron_hbp.recipe import Recipe, Value, flag_words
from megatron_hbp.rehearsal.cpu_limits import fit_cpu
from megatron_hbp.rehearsal.scale_layout import (
    Places,
    fewer_places,
    read_places,
    scale_layers,
    scale_layout,
    scale_levels,
)
from megatron_hbp.rehearsal.scale_model import num_dense_layers, scale_model
from megatron_hbp.rehearsal.scaling import Change, Scaling, given_flags

FEWEST_STEPS = 6
WEIGHTS_STEPS = "steps-of-weights"  # the step log of the run that makes weights


@dataclass(frozen=True)
class Scaled:
    """flags: of the scaled run, without its folders. before, levels_before: the recipe's own layout
    and levels. epochs: of the corpus in num_steps steps. save_interval: steps between checkpoints.
    """

    flags: dict[str, Value]
    changes: tuple[Change, ...]
    places: Places
    levels: tuple[Level, ...]
    levels_before: tuple[Level, ...]
    num_steps: int
    epochs: int
    save_interval: int

    @property
    def starts_from_weights(self) -> bool:
        return "pretrained-checkpoint" in self.flags

    def count(self, flag: str) -> int:
        """How often a flag that may be repeated is given."""
        return len(Scaling(self.flags).texts(flag))

    def command_line(self, folder: Path) -> list[str]:
        """Words for the host's parser; everything that the run reads and writes is in `folder`."""
        return flag_words(self._in(folder))

    def weights_command_line(self, folder: Path) -> list[str]:
        """Of a run that makes the weights which the others start from, in a step at rate 0."""
        flags = self._in(folder)
        weights = flags["pretrained-checkpoint"]
        away = ("pretrained-checkpoint", "load", "tensorboard-dir", "decoupled-lr")
        flags = {name: value for name, value in flags.items() if name not in away} | _WEIGHTS_ONLY
        if flags["seed"] == Scaling(self.flags).number("seed", _HOST_SEED):
            flags["seed"] = _WEIGHTS_SEED + 1  # other weights than the run would make by itself
        if "moe-router-enable-expert-bias" in flags:
            flags["moe-router-bias-update-rate"] = 0.0
        flags |= {"save": weights, "hbp-step-log": str(folder / WEIGHTS_STEPS)}
        return flag_words(flags)

    def _in(self, folder: Path) -> dict[str, Value]:
        """The flags with the folders of a rehearsal in `folder`."""
        flags = dict(self.flags)
        for flag in ("hbp-corpus", "hbp-valid-corpus"):
            folders = corpus_folders(folder, flag, self.count(flag))
            flags[flag] = [str(path) for path in folders]
        for flag, name in _FOLDERS.items():
            if flag in flags:
                flags[flag] = str(folder / name)
        return flags


_HOST_SEED, _WEIGHTS_SEED = 1234, 4321

# A run of one step that leaves weights behind which no other run would start from by itself.
_WEIGHTS_ONLY: dict[str, Value] = {
    "seed": _WEIGHTS_SEED,
    "lr": 0.0,
    "min-lr": 0.0,
    "exit-interval": 1,
    "save-interval": 1,
    "no-save-optim": True,
    "no-save-rng": True,
}

_FOLDERS = {
    "hbp-plan-cache": "plans",
    "hbp-step-log": "steps",
    "save": "checkpoints",
    "load": "checkpoints",
    "pretrained-checkpoint": "weights",
    "tensorboard-dir": "tensorboard",
}
_IF_GIVEN = ("pretrained-checkpoint", "tensorboard-dir")  # the others are always given


def corpus_folders(folder: Path, flag: str, count: int) -> list[Path]:
    """Where the synthetic corpora of a flag lie."""
    return [folder / f"{flag.removeprefix('hbp-')}-{place}" for place in range(count)]


def scale(
    recipe: Recipe,
    more: Sequence[str] = (),
    *,
    num_steps: int = 8,
    num_processes: int | None = None,
) -> Scaled:
    """more: flags that win over the recipe's. num_processes: at most so many (default 8).

    Raises ValueError when the recipe's own flags do not fit together, or cannot be scaled.
    """
    if num_steps < FEWEST_STEPS:
        raise ValueError(
            f"--steps is {num_steps}; give at least {FEWEST_STEPS}: a checkpoint, steps after it "
            "that are lost and trained again, and steps to the end"
        )
    scaling = Scaling(given_flags(recipe, more))
    if "hbp-plan" in scaling:
        raise ValueError(
            "--hbp-plan is a plan for the real run; a rehearsal plans for itself: give "
            "--hbp-corpus and --hbp-level instead"
        )
    if "hbp-corpus" not in scaling:
        raise ValueError("--hbp-corpus is missing; add it to the recipe, or after --")
    own, levels = read_places(scaling, recipe.gpus)
    few = fewer_places(own, num_processes)
    layers = scaling.number("num-layers")
    is_moe = "num-experts" in scaling
    dense = num_dense_layers(scaling.flags) if is_moe else 0
    scale_layout(scaling, own, few)
    new_layers = scale_layers(scaling, own, few, dense, is_moe)
    scale_model(scaling, own, few, new_layers)
    new_levels = scale_levels(scaling, levels, few, layers, new_layers)
    fit_cpu(scaling)
    epochs = _scale_schedule(scaling, num_steps)
    return Scaled(
        flags=scaling.flags,
        changes=scaling.changes(),
        places=few,
        levels=new_levels,
        levels_before=levels,
        num_steps=num_steps,
        epochs=epochs,
        save_interval=num_steps // 2,
    )


def _scale_schedule(scaling: Scaling, num_steps: int) -> int:
    """Epochs, curriculum, warm-up, checkpoints and folders; returns the epochs."""
    epochs = min(scaling.number("hbp-epochs", 1), 2)
    short = f"{num_steps} steps"
    if "hbp-epochs" in scaling:
        scaling.set("hbp-epochs", epochs, short)
    for flag, most in (
        ("hbp-curriculum-steps", 2),
        ("lr-warmup-iters", 2),
        ("lr-wsd-decay-iters", 2),
        ("manual-gc-interval", 2),
        ("eval-interval", num_steps // 2),
        ("tensorboard-log-interval", 1),
    ):
        if flag in scaling:
            scaling.set(flag, min(scaling.number(flag), most), short)
    synthetic = "synthetic, lengths scaled from the recipe's"
    for flag in ("hbp-corpus", "hbp-valid-corpus"):
        if flag in scaling:
            names = scaling.texts(flag)
            scaling.set(flag, [f"{flag[4:]}-{place}" for place in range(len(names))], synthetic)
    scaling.set("save-interval", num_steps // 2, "saved, killed after it, and resumed")
    own_folder = "a folder of the rehearsal"
    for flag, name in _FOLDERS.items():
        if flag in scaling or flag not in _IF_GIVEN:
            scaling.set(flag, name, own_folder)
    return epochs
