"""The same tokens on the same ranks under many layouts and CP schedules; equal runs run once."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp.corpus import Corpus, write_corpus
from megatron_hbp.level import Level
from tests.distributed import flags, handmade
from tests.distributed.cluster import Cluster

RATE_ZERO = ["--lr", "0", "--min-lr", "0"]


@dataclass(frozen=True)
class Layout:
    """num_ranks: places in the DP x CP domain. budget: tokens per rank and micro-batch."""

    num_ranks: int
    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    num_microbatches: int = 2
    budget: int = 64

    @property
    def world_size(self) -> int:
        return self.num_ranks * self.tp_size * self.pp_size

    @property
    def slots_per_step(self) -> int:
        return self.num_ranks * self.num_microbatches

    def flags(self) -> list[str]:
        values = {
            "--seq-length": self.budget,
            "--global-batch-size": self.slots_per_step,
            "--tensor-model-parallel-size": self.tp_size,
            "--pipeline-model-parallel-size": self.pp_size,
            "--expert-model-parallel-size": self.ep_size,
        }
        given = [text for flag, value in values.items() for text in (flag, str(value))]
        return given + (["--sequence-parallel"] if self.tp_size > 1 else [])


def schedule(kind: str, layout: Layout, num_steps: int) -> list[int]:
    """CP size of each micro-batch: "1", "2", "4" everywhere; "step", "microbatch" switch it."""
    sizes = [cp for cp in (1, 2, 4, 8) if cp <= layout.num_ranks]
    places = range(num_steps * layout.num_microbatches)
    if kind == "step":
        return [sizes[m // layout.num_microbatches % len(sizes)] for m in places]
    if kind == "microbatch":
        return [sizes[m % len(sizes)] for m in places]
    return [int(kind)] * len(places)


@dataclass(frozen=True)
class Run:
    """Per step: loss, gradient norm, trained tokens; all ranks agree. ranks: all else they say."""

    losses: list[float]
    gradient_norms: list[float]
    trained: list[int]
    ranks: list[dict[str, Any]] = field(repr=False, compare=False)

    @classmethod
    def of(cls, ranks: list[dict[str, Any]], tp_size: int) -> "Run":
        norms = ranks[0]["gradient_norms"]
        assert all(rank["gradient_norms"] == norms for rank in ranks)
        last_stage = [rank for rank in ranks if rank["trained"]]
        losses = [[step["lm loss"] for step in rank["losses"]] for rank in last_stage]
        assert all(other == losses[0] for other in losses)
        trained = np.sum([rank["trained"] for rank in last_stage], axis=0) // tp_size
        assert np.all(np.isfinite([*losses[0], *norms]))
        return cls(losses[0], norms, trained.tolist(), ranks)


class Bench:
    """Runs jobs over corpora whose documents fill each rank's slot exactly."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self.folder = folder
        self._runs: dict[str, Run] = {}
        self._num_plans = 0
        self._corpora: dict[tuple, tuple[Corpus, list[list[int]]]] = {}

    def run(
        self,
        layout: Layout,
        kind: str,
        model: list[str],
        *,
        num_steps: int = 4,
        same_tokens: bool = False,
        levels: tuple[str, ...] = (),
        **job: Any,
    ) -> Run:
        """kind: see `schedule`, or CP sizes as "1,2,4". levels: level texts in place of plain ones.

        same_tokens: every step has the first step's tokens. job: keywords of jobs_watched.train.
        """
        key = json.dumps([str(layout), kind, model, num_steps, same_tokens, levels, job])
        if key not in self._runs:
            cp_sizes = (
                [int(cp) for cp in kind.split(",")]
                if "," in kind
                else schedule(kind, layout, num_steps)
            )
            corpus, slots = self._corpus(layout, num_steps, same_tokens)
            plan = handmade.regrouped(
                self._new_plan_folder(),
                corpus,
                slots,
                cp_sizes,
                budget=layout.budget,
                num_ranks=layout.num_ranks,
                num_microbatches=layout.num_microbatches,
                levels=tuple(map(Level.parse, levels)) or None,
                tp_size=layout.tp_size,
            )
            self._runs[key] = self.run_plan(layout, plan, model, **job)
        return self._runs[key]

    def _new_plan_folder(self) -> Path:
        self._num_plans += 1
        return self.folder / f"plan-{self._num_plans}"

    def run_plan(self, layout: Layout, plan: Path, model: list[str], **job: Any) -> Run:
        """One job over a saved plan."""
        argv = [*flags.COMMON, *flags.SIZE, *layout.flags(), "--hbp-plan", str(plan), *model]
        ranks = self._cluster.run(
            layout.world_size, "tests.distributed.jobs_watched:train", argv=argv, **job
        )
        return Run.of(ranks, layout.tp_size)

    def _corpus(
        self, layout: Layout, num_steps: int, same_tokens: bool
    ) -> tuple[Corpus, list[list[int]]]:
        key = (layout.slots_per_step, layout.budget, num_steps, same_tokens)
        if key not in self._corpora:
            repeats = num_steps if same_tokens else 1
            num_slots = layout.slots_per_step * num_steps // repeats
            slots = handmade.exact_slots(num_slots, layout.budget)
            self._corpora[key] = slot_corpus(
                self.folder / f"corpus-{len(self._corpora)}", slots, repeats=repeats
            )
        return self._corpora[key]


def slot_corpus(
    folder: Path, slots: list[list[int]], *, repeats: int = 1, trained: float = 0.6, seed: int = 0
) -> tuple[Corpus, list[list[int]]]:
    """A corpus of the slots' documents, all of them `repeats` times over; ids of each slot."""
    rng = np.random.default_rng(seed)
    lens = [length for slot in slots for length in slot]
    sequences = []
    for length in lens:
        mask = (rng.random(length) < trained).astype(np.uint8)
        mask[-1] = 1
        sequences.append((rng.integers(0, handmade.VOCAB, length), mask))
    corpus = write_corpus(
        folder,
        iter(sequences * repeats),
        vocab_size=handmade.VOCAB,
        end_id=0,
        info={"made_by": "test"},
    )
    ids, first = [], 0
    for slot in slots * repeats:
        ids.append(list(range(first, first + len(slot))))
        first += len(slot)
    return corpus, ids


def assert_same(run: Run, reference: Run, *, bits: bool = True) -> None:
    """Loss, gradient norm and trained tokens of every step: to 1e-6, and where it holds by bits."""
    assert run.trained == reference.trained
    np.testing.assert_allclose(run.losses, reference.losses, rtol=1e-6)
    np.testing.assert_allclose(run.gradient_norms, reference.gradient_norms, rtol=1e-6)
    if bits:
        assert run == reference, "equal to 1e-6, but no longer bit by bit"


def assert_steps_same(run: Run, *, bits: bool = True) -> None:
    """For runs at learning rate 0 whose steps have the same tokens: no step differs from step 1."""
    first = Run(run.losses[:1], run.gradient_norms[:1], run.trained[:1], [])
    for step in range(1, len(run.losses)):
        here = slice(step, step + 1)
        assert_same(
            Run(run.losses[here], run.gradient_norms[here], run.trained[here], []), first, bits=bits
        )
    assert run.gradient_norms[0] > 1e-3


def cp_sizes_seen(run: Run) -> set[int]:
    """CP sizes that attention really ran under, the same on all ranks."""
    seen = [{visit["cp_size"] for visit in rank["visits"]} for rank in run.ranks]
    assert all(other == seen[0] for other in seen)
    return seen[0]
