"""The measurements that ranks of `host_job.py` run, one JSON per rank.

- overhead: one process; HBP's forward step, HBP's with every step logged, and a bare one take turns
  on the same packs.
- switch: the same micro-batches of two CP sizes, grouped by size or in turn.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

from benchmarks import host_run
from benchmarks.host_bare import BareBatch, BareForwardStep
from benchmarks.host_counts import num_process_groups
from benchmarks.host_run import HostRun

WARM_UP_ROUNDS = 3
PER_SIZE = 8  # micro-batches of each CP size in a step of the switch job


def flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group(title="bench")
    group.add_argument("--bench-job", choices=sorted(JOBS), required=True)
    group.add_argument("--bench-rounds", type=int, required=True)
    group.add_argument("--bench-output", required=True, metavar="DIR")
    return parser


def measure(arms: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Runs every arm once a round, in an order that changes from round to round.

    Returns wall and process CPU seconds of each run, by arm, in order of rounds.
    """
    times = {name: {"wall": [], "cpu": []} for name in arms}
    orders = list(itertools.permutations(arms))
    for index in range(-WARM_UP_ROUNDS, rounds):
        for name in orders[index % len(orders)]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            arms[name]()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if index >= 0:
                times[name]["wall"].append(wall)
                times[name]["cpu"].append(cpu)
    return times


def overhead(run: HostRun, rounds: int) -> dict[str, Any]:
    plan, bare = run.plan, BareForwardStep(run.plan)
    items = [run.dataset[i] for i in range(len(run.dataset))]
    batches = [BareBatch.of(item) for item in items]

    reading: list[float] = []

    def read() -> Iterator[dict[str, Any]]:
        for index in itertools.cycle(range(len(run.dataset))):
            start = time.process_time()
            item = run.dataset[index]
            reading.append(time.process_time() - start)
            yield item

    iterators = {
        "bare": host_run.data_iterator(itertools.cycle(batches)),
        "hbp": host_run.data_iterator(read()),
        "hbp, logged": host_run.data_iterator(read()),
    }

    def forward_step(name: str) -> host_run.ForwardStep:
        run.log_steps(name == "hbp, logged")
        return bare if name == "bare" else run.training.forward_step

    arms = {
        name: (lambda name=name: run.step(forward_step(name), iterators[name]))
        for name in iterators
    }
    times = measure(arms, rounds)
    on_host = list(host_run.tensors_of(items))
    counts = {
        name: run.counted_step(forward_step(name), batches if name == "bare" else items, on_host)[0]
        for name in arms
    }

    return {
        "times": times,
        "counts": counts,
        "dataset_seconds": statistics.median(reading),
        "losses_equal": _losses_equal(run, bare, items, batches),
        "num_microbatches": plan.num_microbatches,
        "token_budget": plan.token_budget,
        "documents": sum(item["num_documents"] for item in items) / len(items),
        "parameters": sum(p.numel() for chunk in run.model for p in chunk.parameters()),
    }


def _losses_equal(run: HostRun, bare: BareForwardStep, items: Any, batches: Any) -> bool:
    """Whether both forward steps return the same loss, bit for bit, on every micro-batch."""
    run.log_steps(False)
    get_rerun_state_machine().set_mode(RerunMode.DISABLED)  # outside of a step, as in evaluation
    equal = True
    for item, batch in zip(items, batches, strict=True):
        found = []
        for forward_step, given in ((run.training.forward_step, item), (bare, batch)):
            output, loss = forward_step(iter([given]), run.model[0])
            found.append(loss(output)[0].detach())
        equal &= torch.equal(*found)
    return equal


def switch(run: HostRun, rounds: int) -> dict[str, Any]:
    run.log_steps(False)
    by_level = [
        [i for i, found in enumerate(run.plan.microbatch_level) if found == level][:PER_SIZE]
        for level in range(2)
    ]
    assert all(len(found) == PER_SIZE for found in by_level), "the plan has too few micro-batches"
    indices = {
        "grouped": [*by_level[0], *by_level[1]],
        "in turn": [i for pair in zip(*by_level, strict=True) for i in pair],
    }
    orders = {
        name: [run.dataset[i] | {"microbatch": place} for place, i in enumerate(order)]
        for name, order in indices.items()
    }

    def step(name: str) -> Any:
        return run.step(run.training.forward_step, host_run.data_iterator(orders[name]))

    groups_before = num_process_groups()
    counts, losses = {}, {}
    for name, items in orders.items():
        step(name)  # the first one creates the optimizer's state
        counts[name], report = run.counted_step(
            run.training.forward_step, items, host_run.tensors_of(items)
        )
        losses[name] = {key: float(value) for key, value in report.items()}
    times = measure({name: (lambda name=name: step(name)) for name in orders}, rounds)
    return {
        "times": times,
        "counts": counts,
        "losses": losses,
        "groups": [groups_before, num_process_groups()],
        "switches": {name: _switches(run, order) for name, order in indices.items()},
        "token_budget": run.plan.token_budget,
    }


def _switches(run: HostRun, order: list[int]) -> int:
    levels = [int(run.plan.microbatch_level[i]) for i in order]
    return sum(a != b for a, b in itertools.pairwise(levels))


JOBS = {"overhead": overhead, "switch": switch}


def main() -> None:
    """Reads sys.argv: the host's flags, --hbp-* and --bench-*."""
    run = host_run.start(flags)
    result = JOBS[run.args.bench_job](run, run.args.bench_rounds)
    path = Path(run.args.bench_output) / f"rank-{dist.get_rank()}.json"
    path.write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()
