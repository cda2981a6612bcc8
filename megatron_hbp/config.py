"""Every --hbp-* flag: a field of HbpConfig, its help text the docstring below it.

Guarantees:
- `HbpConfig` is valid once it exists, as far as can be told without the host's arguments;
- the argparse group holds one flag per field and no other; a flag that is not given is None (or
  empty), so that "given" and "left alone" can be told apart against a plan;
- without a flag that names a plan or a corpus, the plugin is off (`enabled` is False).
"""

import argparse
import ast
import dataclasses
import inspect
import math
import textwrap
from dataclasses import dataclass, field
from typing import Any

from megatron_hbp.level import Level

MIXING_MODES = ("auto", "microbatch", "step")
OVERLONG_POLICIES = ("error", "drop", "truncate")
PACKERS = ("best_fit", "best_fit_decreasing", "first_fit_decreasing", "isf", "next_fit")
LOSS_NORMALIZERS = ("ave-token", "token-mean", "sample-mean", "sum")


def _flag(default: Any = None, **argparse_options: Any) -> Any:
    return field(default=default, metadata=argparse_options)


@dataclass(frozen=True, kw_only=True)
class HbpConfig:
    """What a user can set. Defaults of flags that shape a plan are in PLAN_DEFAULTS."""

    plan: str | None = _flag(metavar="DIR")
    """A plan made by `hbp plan`. It names its corpus; --hbp-corpus overrides the folder. A flag
    that shapes plans and contradicts this one is an error."""

    corpus: tuple[str, ...] = _flag((), metavar="DIR", action="append")
    """A corpus made by `hbp prepare`; repeat the flag to train several in one plan, each a source
    that every step has its share of. Without --hbp-plan they are planned at start-up, by one
    process of those that see the same --hbp-plan-cache; the others wait for the file."""

    source_weight: tuple[float, ...] | None = _flag(type=float, metavar="W", action="append")
    """How often an epoch takes each sequence of a corpus: 2 is twice, 0.5 every other epoch, 0
    leaves it out. Once for each --hbp-corpus, in the same order (default: once each)."""

    level: tuple[Level, ...] = _flag((), metavar="PACK_LEN:CP[:RECOMPUTE]", action="append")
    """One level; repeat the flag, ascending, e.g. 16384:1:28 and 131072:8:full. PACK_LEN is in
    tokens and must be --seq-length x CP. RECOMPUTE is a number of layers of the whole model or
    'full' (default 0)."""

    epochs: int | None = _flag(type=int, metavar="N")
    """Epochs in the plan, 1 or more (default 1). Sets --train-iters when that is not given, so that
    the learning-rate schedule ends on the last step."""

    curriculum_steps: int | None = _flag(type=int, metavar="N")
    """Steps at the start that train CP 1 levels only, 0 or more (default 0)."""

    mixing: str | None = _flag(choices=MIXING_MODES)
    """What a step holds: `microbatch` makes every step look like the corpus, whatever the levels;
    `step` gives each step one level; `auto` is `microbatch` without pipeline stages and, with them,
    groups micro-batches that take about the same time, of one level or several, because unlike ones
    stall a pipeline (default auto)."""

    max_mixing: float | None = _flag(type=float, metavar="RATIO")
    """With pipeline stages, the largest mixing ratio (1: steps differ like random ones) that `auto`
    and `step` may reach: of the steps within it the fastest are taken. 0 is no bound: steps are
    mixed only where that costs next to no time (default 0.0)."""

    overlong: str | None = _flag(choices=OVERLONG_POLICIES)
    """What happens to a sequence longer than the longest level: stop, drop it or truncate it, the
    latter two counted (default error)."""

    packer: str | None = _flag(choices=PACKERS)
    """Packing method (default best_fit)."""

    seed: int | None = _flag(type=int, metavar="N")
    """Seed of the plan, 0 or more (default 1234). Independent of Megatron's --seed."""

    plan_cache: str | None = _flag(metavar="DIR")
    """Where plans made at start-up are kept (default: the folder `plans` of the first corpus). It
    may be shared by all nodes or local to each: then each node makes the same plan for itself."""

    plan_timeout: float = _flag(3600.0, type=float, metavar="SECONDS")
    """How long a rank waits for a plan that another process makes, in seconds (default 3600)."""

    valid_corpus: str | None = _flag(metavar="DIR")
    """A corpus to evaluate on. Every row is evaluated once, weighted by trained tokens, at every
    --eval-interval (default: once, at the end)."""

    loss_normalizer: str = _flag("ave-token", choices=LOSS_NORMALIZERS)
    """How token losses of a step become one loss: ave-token (sum over the trained tokens of the
    step), token-mean (mean of each pack, then mean over ranks and micro-batches), sample-mean (mean
    of each sequence, then mean over sequences), sum (default ave-token)."""

    cp_backend: str = _flag("ulysses", choices=("ulysses",))
    """How attention is split over context-parallel ranks (default ulysses)."""

    device: str = _flag("cuda", choices=("cuda", "cpu"))
    """`cpu` trains on CPU over gloo: a rehearsal of cluster flags on a laptop (default cuda)."""

    step_log: str | None = _flag(metavar="DIR")
    """A folder of JSON lines, one file per rank of the last pipeline stage, one line per step: for
    each micro-batch its level, CP size, loss sum, trained tokens, CPU seconds and the ids of its
    sequences, so that `hbp audit PLAN --step-log DIR` proves what was trained (default: none)."""

    def __post_init__(self) -> None:
        _require(
            self.epochs is None or self.epochs >= 1,
            f"--hbp-epochs is {self.epochs}; it must be at least 1",
        )
        _require(
            self.curriculum_steps is None or self.curriculum_steps >= 0,
            f"--hbp-curriculum-steps is {self.curriculum_steps}; it must be at least 0",
        )
        _require(
            self.seed is None or self.seed >= 0,
            f"--hbp-seed is {self.seed}; it must be at least 0",
        )
        _require(
            self.max_mixing is None or self.max_mixing >= 0,
            f"--hbp-max-mixing is {self.max_mixing}; it must be at least 0",
        )
        _require(
            self.source_weight is None
            or all(math.isfinite(weight) and weight >= 0 for weight in self.source_weight),
            f"--hbp-source-weight is {_words(self.source_weight)}; each must be a finite number of "
            "0 or more",
        )
        _require(
            self.plan_timeout > 0,
            f"--hbp-plan-timeout is {self.plan_timeout}; it must be above 0 seconds",
        )
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            _require(
                value is None or value in allowed,
                f"{flag_name(name)} is {value!r}; it must be one of {', '.join(allowed)}",
            )
        if self.enabled:
            _require(
                self.plan is not None or len(self.level) > 0,
                "--hbp-corpus without --hbp-plan needs at least one --hbp-level, "
                "e.g. --hbp-level 16384:1",
            )
            return
        for name in given_names(self):
            _require(
                name == "device",
                f"{flag_name(name)} is given without --hbp-plan or --hbp-corpus; name one of them, "
                "or leave it out to train without HBP",
            )

    @property
    def enabled(self) -> bool:
        """Whether the plugin is on."""
        return self.plan is not None or len(self.corpus) > 0


PLAN_DEFAULTS: dict[str, Any] = {
    "epochs": 1,
    "curriculum_steps": 0,
    "mixing": "auto",
    "max_mixing": 0.0,
    "overlong": "error",
    "packer": "best_fit",
    "seed": 1234,
}

_CHOICES = {
    f.name: tuple(f.metadata["choices"])
    for f in dataclasses.fields(HbpConfig)
    if "choices" in f.metadata
}


def flag_name(field_name: str) -> str:
    """The command-line flag of a field."""
    return "--hbp-" + field_name.replace("_", "-")


def in_flags(message: str) -> str:
    """An error of the planner's in the words of the command line: its flag in place of its name."""
    name = message.partition(" ")[0]
    return flag_name(name) + message.removeprefix(name) if name in PLAN_DEFAULTS else message


def given_names(config: HbpConfig) -> list[str]:
    """Fields that differ from their default, in order."""
    return [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != f.default]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of HbpConfig to a parser as one group; returns the parser."""
    group = parser.add_argument_group("hbp", "hierarchical balance packing")
    help_texts = field_docs(HbpConfig)
    for f in dataclasses.fields(HbpConfig):
        group.add_argument(
            flag_name(f.name),
            dest=f"hbp_{f.name}",
            default=list(f.default) if isinstance(f.default, tuple) else f.default,
            help=help_texts[f.name].replace("%", "%%"),
            **f.metadata,
        )
    return parser


def config_from_args(args: argparse.Namespace) -> HbpConfig:
    """Builds the config from parsed flags. Raises ValueError with the flag, the rule, a way out."""
    values = {f.name: getattr(args, f"hbp_{f.name}") for f in dataclasses.fields(HbpConfig)}
    values["level"] = tuple(Level.parse(text) for text in values["level"])
    values["corpus"] = tuple(values["corpus"])
    if values["source_weight"] is not None:
        values["source_weight"] = tuple(values["source_weight"])
    return HbpConfig(**values)


def field_docs(cls: type) -> dict[str, str]:
    """Docstrings that follow the fields of a dataclass, on one line each."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[statement.target.id] = " ".join(str(after.value.value).split())
    return docs


def _words(values: Any) -> str:
    """The values as a user would repeat a flag."""
    return " ".join(f"{value:g}" for value in values or ())


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
