"""What each step did, by level: in the log, in TensorBoard and W&B, and in files of its own.

- Every --log-interval steps the last rank prints one line per level, and hands the same numbers to
  Megatron's writers. Only the loss needs communication: one all-reduce of two numbers per level,
  inside the DP x CP group of the last pipeline stage, at those steps only. A level's loss is its
  weighted sum over its trained tokens: a mean under the normalizer ave-token.
- --hbp-step-log DIR: every rank of the last pipeline stage appends to its own file, without
  communication: per micro-batch the level, the size of the CP group that attention was given, the
  loss sum, trained tokens, CPU time of forward and backward, at full precision, and the ids of the
  sequences, on one of the ranks that share a pack. Level and ids are the plan's for the index that
  was read, the rest is measured. `hbp audit PLAN --step-log DIR` holds the files against the plan.
In the log padding and balance come from the plan, so they cost nothing at run time.
"""

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, print_rank_last

from megatron_hbp.host.resume import Start
from megatron_hbp.metrics import attention_balance_ratio
from megatron_hbp.plan import Plan


class StepLog:
    """Collects one step's micro-batches.

    A step that the host runs again (to tell a fault from a result) overwrites its own numbers; the
    file gets a line for each of its runs, and a line {"plan", "start"} where a process starts with
    a step of the plan: what was logged of later steps before it does not count. rank: in the DP x
    CP domain.
    """

    def __init__(
        self, plan: Plan, folder: str | None, rank: int, first_step: int, start: Start
    ) -> None:
        self._plan = plan
        self._reports: dict[int, torch.Tensor] = {}
        self._cp_sizes: dict[int, int] = {}
        self._cpu_seconds: dict[int, float] = {}
        self._started: dict[int, float] = {}
        self._wall_start = 0.0
        self._file = None
        self._rank = rank
        self._first_iteration = start.first_iteration
        self._plan_name = plan.hash()[:12]
        self._names_sequences = parallel_state.get_tensor_model_parallel_rank() == 0
        if folder is not None and parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = _open_log(Path(folder) / f"rank-{dist.get_rank():05d}.jsonl")
            self._add_line({"plan": self._plan_name, "start": first_step, "rank": rank})

    def start_microbatch(self, item: dict[str, Any]) -> None:
        if item["microbatch"] == 0:
            self._reports.clear()
            self._wall_start = time.perf_counter()
        self._started[item["microbatch"]] = time.process_time()

    def end_microbatch(
        self, item: dict[str, Any], cp_size: int, loss: torch.Tensor, report: torch.Tensor
    ) -> None:
        """Called on the last pipeline stage, after the forward of a micro-batch.

        cp_size: of the group that attention was given.
        """
        microbatch = item["microbatch"]
        self._reports[microbatch] = report
        self._cp_sizes[microbatch] = cp_size
        if self._file is not None and loss.requires_grad:
            loss.register_hook(lambda grad: self._when_backward_ends(item, grad))
        if len(self._reports) < self._plan.num_microbatches:
            return
        step = item["step"]
        if (step + 1) % get_args().log_interval == 0:
            self._log_levels(step)

    def _when_backward_ends(self, item: dict[str, Any], grad: torch.Tensor) -> torch.Tensor:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(item))
        return grad

    def _finish(self, item: dict[str, Any]) -> None:
        microbatch = item["microbatch"]
        self._cpu_seconds[microbatch] = time.process_time() - self._started[microbatch]
        if len(self._cpu_seconds) < self._plan.num_microbatches:
            return
        losses = torch.stack([self._reports[m] for m in sorted(self._reports)]).tolist()
        first = item["step"] * self._plan.num_microbatches
        line = {
            "plan": self._plan_name,
            "step": item["step"],
            "iteration": self._first_iteration + item["step"] + 1,
            "rank": self._rank,
            "wall_seconds": time.perf_counter() - self._wall_start,
            "microbatches": [
                {
                    "level": str(self._plan.levels[self._plan.microbatch_level[first + m]]),
                    "cp_size": self._cp_sizes[m],
                    "loss_sum": losses[m][0],
                    "trained_tokens": int(losses[m][1]),
                    "cpu_seconds": self._cpu_seconds[m],
                    "sequences": self._sequences(first + m),
                }
                for m in range(self._plan.num_microbatches)
            ],
        }
        self._add_line(line)
        self._cpu_seconds.clear()

    def _sequences(self, microbatch: int) -> list[int]:
        """Ids of the rank's pack: on one rank only of those that share it."""
        pack, cp_rank = self._plan.pack_index(microbatch, self._rank)
        return self._plan.pack(pack).tolist() if self._names_sequences and cp_rank == 0 else []

    def _add_line(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _log_levels(self, step: int) -> None:
        plan = self._plan
        first = step * plan.num_microbatches
        levels = plan.microbatch_level[first : first + plan.num_microbatches]
        reports = torch.stack([self._reports[m] for m in sorted(self._reports)]).double()
        sums = reports.new_zeros(len(plan.levels), 2)
        where = torch.from_numpy(levels.astype(np.int64)).to(sums.device)
        sums.index_add_(0, where, reports)
        dist.all_reduce(
            sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        for level, (loss_sum, trained) in enumerate(sums.tolist()):
            here = first + np.flatnonzero(levels == level)
            if len(here):
                self._write(step, level, here, loss_sum / trained if trained else 0.0, int(trained))

    def _write(
        self, step: int, level: int, microbatches: np.ndarray, loss: float, trained: int
    ) -> None:
        plan = self._plan
        balance, real = [], 0
        for m in microbatches:
            packs = range(plan.microbatch_offsets[m], plan.microbatch_offsets[m + 1])
            lens = [plan.seq_lens[plan.pack(p)].astype(np.int64) for p in packs]
            real += int(sum(n.sum() for n in lens))
            balance.append(attention_balance_ratio(np.array([[int((n * n).sum()) for n in lens]])))
        capacity = len(microbatches) * plan.num_ranks * plan.token_budget
        values = {
            "loss": loss,
            "trained tokens": trained,
            "padding": 1.0 - real / capacity,
            "attention balance ratio": float(np.mean(balance)),
        }
        name = str(plan.levels[level])
        print_rank_last(
            f" hbp step {step + 1} level {name} | micro-batches: {len(microbatches)} | "
            + " | ".join(
                f"{key}: {value}" if isinstance(value, int) else f"{key}: {value:.6E}"
                for key, value in values.items()
            )
        )
        writer, wandb = get_tensorboard_writer(), get_wandb_writer()
        for key, value in values.items():
            if writer:
                writer.add_scalar(f"hbp {name} {key}", value, step + 1)
            if wandb:
                wandb.log({f"hbp {name} {key}": value}, step + 1)


def _open_log(path: Path) -> TextIO:
    """Opens a file to append lines; one that a killed process left unfinished is ended first."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a", encoding="utf-8")
