"""Checks of what a user gives build_plan(): each raises ValueError: value, rule, a way out."""

import math
from collections.abc import Sequence

import numpy as np

from megatron_hbp.alignment import Alignment
from megatron_hbp.level import Level
from megatron_hbp.packing import check_lengths


def check_weights(
    source_weights: Sequence[float] | None, source_ids: np.ndarray | None
) -> tuple[float, ...] | None:
    """The weights as numbers, one for every source that occurs."""
    if source_weights is None:
        return None
    weights = tuple(float(weight) for weight in source_weights)
    if source_ids is None:
        raise ValueError("source_weights need source_ids; give the source of each sequence")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"source_weights are {weights}; each must be a finite number of 0 or more")
    most = int(source_ids.max(initial=-1))
    if most >= len(weights):
        raise ValueError(
            f"source {most} has no weight: {len(weights)} source_weights are given; give one for "
            "each source, 0 to leave it out"
        )
    return weights


def check_settings(**settings: tuple[float, int]) -> None:
    """Each of name=(value, least): value is at least `least`."""
    for name, (value, least) in settings.items():
        if not value >= least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """The value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def check_arrays(
    seq_lens: np.ndarray, first_trained: np.ndarray | None, source_ids: np.ndarray | None
) -> None:
    """Arrays of the right kind, equally long; their values where that is quick."""
    check_lengths(seq_lens, "seq_lens")
    for name, array in (("first_trained", first_trained), ("source_ids", source_ids)):
        if array is None:
            continue
        check_lengths(array, name)
        if len(array) != len(seq_lens):
            raise ValueError(
                f"{name} has {len(array)} entries for {len(seq_lens)} sequences; it must have one "
                "for each"
            )
    if source_ids is not None and (source_ids < 0).any():
        first = int(np.argmax(source_ids < 0))
        raise ValueError(f"source_ids of sequence {first} is {source_ids[first]}; it must be >= 0")
    if first_trained is not None and (first_trained < 1).any():
        first = int(np.argmax(first_trained < 1))
        raise ValueError(
            f"first_trained of sequence {first} is {first_trained[first]}; it must be at least 1, "
            "because the first token is never a target"
        )


def check_alignment(alignment: Alignment, levels: tuple[Level, ...]) -> None:
    """A multiple for each level, and a token budget that is one."""
    if len(alignment.document_multiples) != len(levels):
        raise ValueError(
            f"the alignment has {len(alignment.document_multiples)} document multiples for "
            f"{len(levels)} levels; make it with alignment() from the CP sizes of the levels"
        )
    budget, multiple = levels[0].tokens_per_rank, alignment.budget_multiple
    if budget % multiple:
        below = budget // multiple * multiple
        raise ValueError(
            f"the token budget S is {budget}, but it must be a multiple of {multiple} (sequence "
            f"parallelism x FP8 recipe); use S = {below or multiple} or {below + multiple}"
        )
