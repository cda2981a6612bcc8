"""What is kept of every sequence of the input, what is dropped or cut, and why.

Guarantees (asserted by tests/unit/test_planner.py):
- tokens in = kept + dropped + truncated, to the token;
- every dropped sequence has one reason, the first that applies of DROP_REASONS in plan.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_hbp import _C
from megatron_hbp.plan import (
    DROP_EMPTY,
    DROP_OVERLONG,
    DROP_REASONS,
    DROP_UNTRAINABLE,
    DROP_WEIGHTLESS,
)


class SequenceError(ValueError):
    """What is wrong with one sequence; a corpus can tell where it came from."""

    def __init__(self, sequence: int, text: str) -> None:
        super().__init__(text)
        self.sequence = sequence


def where_from(error: SequenceError, origin: Callable[[int], str | None]) -> str:
    """The error's text with the file and line of its sequence before it, where they are known."""
    place = origin(error.sequence)
    return str(error) if place is None else f"{place}: {error}"


@dataclass(frozen=True)
class Kept:
    """lens: int32|int64 [n], tokens kept of each sequence, 0 if dropped; the others as in Plan.

    lens are the given ones where nothing is dropped or cut: no copy lies beside what a plan is made
    of.
    """

    lens: np.ndarray
    dropped_ids: np.ndarray
    dropped_reason: np.ndarray
    truncated_ids: np.ndarray
    tokens_in: int
    tokens_dropped: int
    tokens_truncated: int


def keep(
    seq_lens: np.ndarray,
    *,
    first_trained: np.ndarray | None,
    source_ids: np.ndarray | None,
    weights: tuple[float, ...] | None,
    longest: int,
    overlong: str,
) -> Kept:
    """Applies the over-long policy; drops what is empty, trains nothing or has weight 0.

    Arguments as in build_plan(); longest: tokens that the longest level holds. Raises ValueError
    when there is nothing to plan, a length is negative, or `overlong` is error and one is.
    """
    if len(seq_lens) == 0:
        raise ValueError("there is no sequence to plan; give at least one length")
    least, most, tokens_in = _C.survey(seq_lens)
    if least < 0:
        first = int(np.argmax(seq_lens < 0))
        raise ValueError(f"sequence {first} has {seq_lens[first]} tokens; it must have 0 or more")
    if most > longest and overlong == "error":
        too_long = np.flatnonzero(seq_lens > longest)
        raise SequenceError(
            int(too_long[0]),
            f"sequence {too_long[0]} has {seq_lens[too_long[0]]} tokens, but the longest level "
            f"holds {longest}; {len(too_long)} of {len(seq_lens)} sequences are over-long; "
            "add a longer level, or use --hbp-overlong drop or --hbp-overlong truncate",
        )
    given = seq_lens
    truncated = np.empty(0, dtype=np.int64)
    if most > longest and overlong == "truncate":
        truncated = np.flatnonzero(seq_lens > longest)
        seq_lens = np.minimum(seq_lens, longest)
        most = longest
    reasons = {}  # code: ids, the first reason that applies is the one that counts
    if least == 0:
        reasons[DROP_EMPTY] = np.flatnonzero(seq_lens == 0)
    if most > longest:
        reasons[DROP_OVERLONG] = np.flatnonzero(seq_lens > longest)
    if first_trained is not None:
        reasons[DROP_UNTRAINABLE] = np.flatnonzero(first_trained >= seq_lens)
    if weights is not None and source_ids is not None:
        reasons[DROP_WEIGHTLESS] = np.flatnonzero(np.array(weights)[source_ids] == 0)
    dropped, code_at = np.unique(
        np.concatenate([np.empty(0, dtype=np.int64), *reasons.values()]), return_index=True
    )
    codes = np.repeat(list(reasons), [len(ids) for ids in reasons.values()])[code_at]
    if len(dropped) == len(seq_lens):
        counts = ", ".join(
            f"{np.count_nonzero(codes == code)} {reason}"
            for code, reason in enumerate(DROP_REASONS)
            if (codes == code).any()
        )
        raise ValueError(
            f"all {len(seq_lens)} sequences are dropped ({counts}); nothing is left to train on"
        )
    lens = seq_lens
    if len(dropped):
        lens = seq_lens.astype(np.int32)
        lens[dropped] = 0
    tokens_dropped = int(given[dropped].sum(dtype=np.int64))
    return Kept(
        lens=lens,
        dropped_ids=dropped,
        dropped_reason=codes.astype(np.int8),
        truncated_ids=np.setdiff1d(truncated, dropped, assume_unique=True),
        tokens_in=tokens_in,
        tokens_dropped=tokens_dropped,
        tokens_truncated=tokens_in - tokens_dropped - int(lens.sum(dtype=np.int64)),
    )
