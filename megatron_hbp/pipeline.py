"""When every stage works and waits in a step of unequal micro-batches: 1F1B, plain or interleaved.

Guarantees (asserted by tests/unit/test_pipeline.py):
- the order of work is Megatron's: schedules.forward_backward_pipelining_without_interleaving and
  _with_interleaving (megatron-core 0.19), with one group of `stages` micro-batches per chunk;
- times are those of a slow simulation, event by event, for any stages, micro-batches and times;
- busy, neighbour and bubble seconds of a rank add up to the time at which it ends.
Modelled: stages of equal work; a stage that has sent goes on at once; sending takes no time. Ranks
that share a pack or experts begin each forward and backward together.

Order matters: unlike micro-batches one after another make most turns wait for the longest of as
many as there are stages. metrics.pipeline_stretch knows no order: it is exact for equal
micro-batches and a bound where they rise and then fall without interleaving; others take longer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Work(NamedTuple):
    """A forward or backward of one model chunk of one stage."""

    stage: int
    chunk: int
    microbatch: int
    forward: bool


@dataclass(frozen=True)
class Blocks:
    """Neighbouring ranks that begin together, in one micro-batch of each step.

    starts: int64 [blocks], ascending places in [steps, ranks] laid out flat; the first is 0.
    """

    starts: np.ndarray

    def largest(self, values: np.ndarray) -> np.ndarray:
        """float64 [steps, ranks]: the largest of values [steps, ranks] in each block."""
        if len(self.starts) == values.size:
            return values
        largest = np.maximum.reduceat(values.ravel(), self.starts)
        return np.repeat(largest, self._sizes(values.size)).reshape(values.shape)

    def blamed(self, values: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """float64 [ranks]: `seconds` [steps, ranks] of a block, charged to its first largest."""
        num_ranks = values.shape[1]
        places = np.arange(values.size)
        last = np.where((values == self.largest(values)).ravel(), places, values.size)
        charged = np.minimum.reduceat(last, self.starts) % num_ranks
        waited = np.add.reduceat(seconds.ravel(), self.starts)
        return np.bincount(charged, weights=waited, minlength=num_ranks)

    def _sizes(self, num_places: int) -> np.ndarray:
        return np.diff(self.starts, append=num_places)


@dataclass(frozen=True)
class PipelineSeconds:
    """Seconds from the start of a step to the last backward of a rank's stages.

    end: float64 [steps, ranks], all stages of the rank have ended. neighbour: [steps, ranks], mean
    over stages, waited for ranks of the same block. bubble: [steps, ranks], mean over stages,
    waited for other stages: fill, stalls, drain. last_stage: [steps, ranks], from the first forward
    to the last backward of the last stage. neighbour_of, bubble_of: [steps, micro-batches], of all
    ranks together: waited before the micro-batch could be worked on. blamed: [ranks], neighbour
    seconds of others charged to the rank they waited for.
    """

    end: np.ndarray
    neighbour: np.ndarray
    bubble: np.ndarray
    last_stage: np.ndarray
    neighbour_of: np.ndarray
    bubble_of: np.ndarray
    blamed: np.ndarray


def run_pipeline(
    forward: np.ndarray,
    backward: np.ndarray,
    blocks: Sequence[Blocks],
    num_stages: int = 1,
    num_virtual_stages: int = 1,
) -> PipelineSeconds:
    """Simulates steps of equally many micro-batches, all at once.

    forward, backward: float64 [micro-batches, steps, ranks], seconds of a rank's stage, of all its
    model chunks together. blocks: one per micro-batch. Raises ValueError for interleaved stages
    and micro-batches that are no multiple of them: they would wait for each other for ever.
    """
    num_microbatches, num_steps, num_ranks = forward.shape
    if num_virtual_stages > 1 and num_microbatches % num_stages:
        raise ValueError(
            f"{num_microbatches} micro-batches a step are no multiple of {num_stages} interleaved "
            "stages; give a multiple, or one virtual stage"
        )
    shape = (num_steps, num_ranks)
    free = [np.zeros(shape) for _ in range(num_stages)]
    neighbour, bubble = np.zeros(forward.shape), np.zeros(forward.shape)
    first_start = np.zeros(shape)
    blamed = np.zeros(num_ranks)
    ends: dict[Work, np.ndarray] = {}
    started_last = False
    for work in work_order(num_stages, num_virtual_stages, num_microbatches):
        stage, microbatch = work.stage, work.microbatch
        needed = needs(work, num_stages, num_virtual_stages)
        idle_since = free[stage]
        ready = idle_since if needed is None else np.maximum(idle_since, ends.pop(needed))
        start = blocks[microbatch].largest(ready)
        if ready is not idle_since:
            bubble[microbatch] += ready - idle_since
        if start is not ready:
            waited = start - ready
            if waited.any():
                neighbour[microbatch] += waited
                blamed += blocks[microbatch].blamed(ready, waited)
        if stage == num_stages - 1 and not started_last:
            first_start, started_last = start, True
        seconds = forward if work.forward else backward
        free[stage] = start + seconds[microbatch] / num_virtual_stages
        if work.forward or (stage, work.chunk) != (0, 0):  # the others wait for nobody
            ends[work] = free[stage]
    end = np.maximum.reduce(free)
    for stage_end in free:
        bubble[-1] += end - stage_end
    return PipelineSeconds(
        end=end,
        neighbour=neighbour.sum(axis=0) / num_stages,
        bubble=bubble.sum(axis=0) / num_stages,
        last_stage=free[-1] - first_start,
        neighbour_of=neighbour.sum(axis=2).T / num_stages,
        bubble_of=bubble.sum(axis=2).T / num_stages,
        blamed=blamed / num_stages,
    )


def needs(work: Work, num_stages: int, num_virtual_stages: int) -> Work | None:
    """What must have ended before `work`, besides what the stage did before; None for an input."""
    stage, chunk, microbatch, forward = work
    last_chunk = num_virtual_stages - 1
    if forward:
        if stage == 0 and chunk == 0:
            return None
        if stage == 0:
            return Work(num_stages - 1, chunk - 1, microbatch, True)
        return Work(stage - 1, chunk, microbatch, True)
    if stage == num_stages - 1 and chunk == last_chunk:
        return Work(stage, chunk, microbatch, True)
    if stage == num_stages - 1:
        return Work(0, chunk + 1, microbatch, False)
    return Work(stage + 1, chunk, microbatch, False)


def stage_order(
    stage: int, num_stages: int, num_virtual_stages: int, num_microbatches: int
) -> list[Work]:
    """What a stage does, in order: forwards to fill, then one forward and one backward in turn."""
    turns = [
        (chunk, microbatch)
        for first in range(0, num_microbatches, num_stages)
        for chunk in range(num_virtual_stages)
        for microbatch in range(first, min(first + num_stages, num_microbatches))
    ]
    if num_virtual_stages == 1:
        fill = num_stages - stage - 1
    else:
        fill = 2 * (num_stages - stage - 1) + (num_virtual_stages - 1) * num_stages
    fill = min(fill, len(turns))
    forwards = [Work(stage, chunk, microbatch, True) for chunk, microbatch in turns]
    backwards = [
        Work(stage, num_virtual_stages - 1 - chunk, microbatch, False)
        for chunk, microbatch in turns
    ]
    order = forwards[:fill]
    for pair in zip(forwards[fill:], backwards, strict=False):
        order += pair
    return order + backwards[len(turns) - fill :]


@lru_cache(maxsize=32)
def work_order(num_stages: int, num_virtual_stages: int, num_microbatches: int) -> tuple[Work, ...]:
    """The work of all stages, each after what it needs."""
    queues = [
        deque(stage_order(stage, num_stages, num_virtual_stages, num_microbatches))
        for stage in range(num_stages)
    ]
    done: set[Work] = set()
    order: list[Work] = []
    while any(queues):
        before = len(order)
        for queue in queues:
            while queue:
                needed = needs(queue[0], num_stages, num_virtual_stages)
                if needed is not None and needed not in done:
                    break
                order.append(queue.popleft())
                done.add(order[-1])
        assert len(order) > before, "the schedule waits for itself"
    return tuple(order)
