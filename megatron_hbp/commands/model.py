"""What `hbp select`, `simulate` and `report` are told of the run: model, device, layout, profile.

Guarantees (asserted by tests/unit/test_command_model.py):
- ranks, micro-batches and stages are the plan's where there is a plan, and a flag that says
  otherwise is an error; the rest is the profile's where there is one;
- without a profile the cost model is the analytic one of --model and --device; with one it is
  fitted, and --model and --device, when given, must be the profile's.
"""

import argparse
import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from megatron_hbp.cost_model import CostModel, FitReport, RunLayout, analytic, fitted
from megatron_hbp.hardware import DEVICES, find_device
from megatron_hbp.models import MODELS, find_model
from megatron_hbp.plan import Plan
from megatron_hbp.profile import Profile, check_profile_matches

# Field of RunLayout, flag, attribute of Plan that decides it (None: a plan does not say).
_LAYOUT = (
    ("num_ranks", "--ranks", "num_ranks"),
    ("num_microbatches", "--microbatches", "num_microbatches"),
    ("tp_size", "--tp", None),
    ("num_stages", "--stages", "num_stages"),
    ("num_virtual_stages", "--virtual-stages", "num_virtual_stages"),
    ("ep_size", "--ep", None),
    ("expert_tp_size", "--expert-tp", None),
)


@dataclass(frozen=True)
class GivenModel:
    """cost: of a run with the flags given. profile, fit: what it was fitted to, and how well."""

    cost: CostModel
    profile: Profile | None = None
    fit: FitReport | None = None


def add_model(parser: argparse.ArgumentParser, *, from_plan: bool) -> None:
    """from_plan: the command reads a plan, which knows ranks, micro-batches and stages."""
    parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help=f"one of {', '.join(MODELS)}, or a file of Megatron arguments",
    )
    parser.add_argument(
        "--device", metavar="NAME|FILE", help=f"one of {', '.join(DEVICES)}, or a JSON file"
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="times measured on the cluster: the cost model is fitted to them instead of computed "
        "from --model and --device",
    )
    other = "(default: the plan's)" if from_plan else "(default 1)"
    need = "(default: the plan's)" if from_plan else "(default: the profile's)"
    for flag, what in (
        ("--ranks", f"world size / (TP x PP) {need}"),
        ("--microbatches", f"per step {other}"),
        ("--stages", f"pipeline stages {other}"),
        ("--virtual-stages", f"model chunks of a stage {other}"),
        ("--tp", "tensor-parallel size (default: the profile's, or 1)"),
        ("--ep", "expert-parallel size (default: the profile's, or 1)"),
        ("--expert-tp", "tensor-parallel size inside an expert (default: the profile's, or 1)"),
    ):
        parser.add_argument(flag, type=int, metavar="N", help=what)
    parser.add_argument(
        "--chunk-layers",
        metavar="N,N,...",
        help="layers of each pipeline chunk in the order of the layers, stages x virtual stages of "
        "them (default: the profile's, or as even as can be)",
    )


def names_model(namespace: argparse.Namespace) -> bool:
    """Whether a model, a device or a profile is named."""
    return any((namespace.model, namespace.device, namespace.profile))


def given_model(namespace: argparse.Namespace, plan: Plan | None = None) -> GivenModel:
    """The cost model of the flags of add_model(), for a run over `plan` where there is one.

    Raises ValueError for an unknown name, a flag that contradicts the plan or the profile, and a
    layout that cannot be.
    """
    if namespace.profile is not None:
        return _fitted(namespace, plan)
    for flag, given, known in (
        ("--model", namespace.model, MODELS),
        ("--device", namespace.device, DEVICES),
    ):
        if given is None:
            raise ValueError(
                f"{flag} is missing; give one of {', '.join(known)}, a file, or a --profile"
            )
    layout = _layout(namespace, plan, None)
    return GivenModel(analytic(find_model(namespace.model), find_device(namespace.device), layout))


def _fitted(namespace: argparse.Namespace, plan: Plan | None) -> GivenModel:
    profile = Profile.load(namespace.profile)
    layout = _layout(namespace, plan, profile.layout)
    check_profile_matches(
        profile,
        model=namespace.model or profile.model,
        device=namespace.device or profile.device,
        layout=layout,
    )
    try:
        cost, fit = fitted(profile)
    except ValueError as error:
        raise ValueError(f"profile {namespace.profile}: {error}") from None
    return GivenModel(dataclasses.replace(cost, layout=layout), profile, fit)


def _layout(
    namespace: argparse.Namespace, plan: Plan | None, profiled: RunLayout | None
) -> RunLayout:
    """Flags first, then the plan, then the profile, then 1."""
    found: dict[str, Any] = {}
    for name, flag, planned_as in _LAYOUT:
        given = getattr(namespace, flag[2:].replace("-", "_"))
        if given is not None and given < 1:
            raise ValueError(f"{flag} is {given}; it must be at least 1")
        if plan is not None and planned_as is not None:
            planned = getattr(plan, planned_as)
            if given not in (None, planned):
                raise ValueError(
                    f"{flag} is {given}, the plan has {planned}; leave the flag out, or plan again "
                    "for the other number"
                )
            given = planned
        if given is None and profiled is not None:
            given = getattr(profiled, name)
        if given is None and name == "num_ranks":
            raise ValueError("--ranks is missing; give the world size / (TP x PP)")
        found[name] = 1 if given is None else given
    if namespace.chunk_layers is not None:
        found["chunk_layers"] = _chunk_layers(namespace.chunk_layers)
    return dataclasses.replace(profiled or RunLayout(num_ranks=1), **found)


def _chunk_layers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise ValueError(
            f"--chunk-layers is {text!r}; give whole numbers with commas between, such as 8,8,7"
        )
    return tuple(map(int, text.split(",")))
