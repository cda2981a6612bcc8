"""Times of calls that take turns, so that a busy machine slows all of them alike."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any


def best_times(
    calls: Mapping[str, Callable[[], Any]], rounds: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """(seconds, result) of each call by name: the least of `rounds`, which run all calls in turn.

    The order changes from round to round. Each call is made twice in its turn and the second one
    counts, so that all find their memory warm: a virtual machine takes free memory away while the
    others run. Results are freed after the clock has stopped, and the garbage collector is off,
    which matters to peers that return lists.
    """
    seconds = dict.fromkeys(calls, float("inf"))
    results: dict[str, Any] = {}
    names = list(calls)
    enabled = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                results.pop(name, None)
                result = calls[name]()
                del result
                start = time.perf_counter()
                result = calls[name]()
                seconds[name] = min(seconds[name], time.perf_counter() - start)
                results[name] = result
                del result
    finally:
        if enabled:
            gc.enable()
    return seconds, results
