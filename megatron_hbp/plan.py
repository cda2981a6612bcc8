"""Plan: what every rank trains, step by step, as frozen records over int arrays.

A step is num_microbatches consecutive micro-batches; a micro-batch has one level and
num_ranks / cp_size packs, ordered by replica: replica r of a level with CP size c runs on ranks
r*c .. r*c + c - 1. A pack is a run of sequence_ids. A pack without sequences is a filler.

Guarantees (asserted by tests/unit/test_plan.py):
- a saved plan loads back equal, bit for bit, with the same hash; a changed byte is found at load;
- files appear complete or not at all;
- `audit()` finds every violation of the invariants in docs/design.md.
It does not decide anything: that is planner.py.
"""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp import metrics as metrics_module
from megatron_hbp.alignment import Alignment
from megatron_hbp.audit import audit_plan
from megatron_hbp.cost import DENSE_8B_H100, PackCost
from megatron_hbp.level import Level
from megatron_hbp.plan_files import little_endian, load_arrays, load_document, save_folder

FORMAT_VERSION = 3

DROP_OVERLONG, DROP_UNTRAINABLE, DROP_EMPTY, DROP_WEIGHTLESS = range(4)
DROP_REASONS = ("over-long", "no trainable token", "empty", "weight 0")

_ARRAYS = (
    "seq_lens",
    "sequence_ids",
    "pack_offsets",
    "microbatch_offsets",
    "microbatch_level",
    "epoch_offsets",
    "dropped_ids",
    "dropped_reason",
    "truncated_ids",
    "source_ids",
    "carried_ids",
)
_OPTIONAL = ("source_ids", "carried_ids")
_NOT_HASHED = ("corpus_paths",)


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """All steps of all epochs.

    seq_lens: int32|int64 [num_sequences], tokens kept of each input sequence, 0 if dropped.
    sequence_ids: int32|int64 [kept x epochs], in pack order.
    pack_offsets: int64 [num_packs + 1] into sequence_ids.
    microbatch_offsets: int64 [num_microbatches_total + 1] into packs.
    microbatch_level: int16 [num_microbatches_total], index into levels.
    epoch_offsets: int64 [epochs + 1] into steps.
    dropped_ids, truncated_ids: int64, ascending. dropped_reason: int8, index into DROP_REASONS.
    source_ids: int32 [num_sequences] or None, the domain of each input sequence.
    source_weights: how often an epoch takes a sequence of each source (None: once), see weights.py.
    cost: what packs were balanced by (None: attention).
    tokens_in: tokens of the input; tokens_truncated, tokens_dropped: those not kept.
    seq_lens_hash, first_trained_hash: SHA-256 of the planner's inputs; corpus_hash: of the corpus.
    corpus_paths: where it lies, one folder for each of its parts.
    alike: micro-batches of a step were chosen to take about the same time (mixing auto, pipelines).

    Of a plan that goes on with what another one, its parent, has not trained (replan.py):
    parent_hash; parent_steps: steps of the parent that were trained; first_epoch: the number of its
    first epoch in the whole run, which decides weights and shuffles; steps_before, slots_before:
    optimizer steps and rank slots (steps x ranks x micro-batches, the host's samples) that all its
    ancestors trained; carried_ids: int32|int64, the ids that its first epoch still trains,
    ascending, each as often as it does, or None where it starts with a whole epoch.
    """

    levels: tuple[Level, ...]
    num_ranks: int
    num_microbatches: int
    num_stages: int
    num_virtual_stages: int = 1
    seed: int
    packer: str
    mixing: str
    max_mixing: float = 0.0
    curriculum_steps: int
    overlong: str
    cost: PackCost | None = None
    alignment: Alignment
    tokens_in: int
    tokens_dropped: int
    tokens_truncated: int
    seq_lens_hash: str
    first_trained_hash: str | None
    seq_lens: np.ndarray
    sequence_ids: np.ndarray
    pack_offsets: np.ndarray
    microbatch_offsets: np.ndarray
    microbatch_level: np.ndarray
    epoch_offsets: np.ndarray
    dropped_ids: np.ndarray
    dropped_reason: np.ndarray
    truncated_ids: np.ndarray
    source_ids: np.ndarray | None = None
    source_weights: tuple[float, ...] | None = None
    corpus_hash: str | None = None
    corpus_paths: tuple[str, ...] = ()
    alike: bool = False
    parent_hash: str | None = None
    parent_steps: int = 0
    first_epoch: int = 0
    steps_before: int = 0
    slots_before: int = 0
    carried_ids: np.ndarray | None = None

    @property
    def token_budget(self) -> int:
        """S: tokens per rank and micro-batch."""
        return self.levels[0].tokens_per_rank

    @property
    def epochs(self) -> int:
        return len(self.epoch_offsets) - 1

    @property
    def num_steps(self) -> int:
        return int(self.epoch_offsets[-1])

    @property
    def slots_per_step(self) -> int:
        """Rank slots of a step: what the host calls its global batch size."""
        return self.num_ranks * self.num_microbatches

    @property
    def num_packs(self) -> int:
        return len(self.pack_offsets) - 1

    @property
    def folder(self) -> Path | None:
        """Where the plan was loaded from; None for one that was made in this process."""
        filename = getattr(self.seq_lens, "filename", None)  # of a memory-mapped array
        return None if filename is None else Path(filename).parent

    def pack(self, index: int) -> np.ndarray:
        """The sequence ids of pack `index`, in order; empty for a filler."""
        return self.sequence_ids[self.pack_offsets[index] : self.pack_offsets[index + 1]]

    def pack_level(self) -> np.ndarray:
        """int16 [num_packs]: the level index of each pack."""
        return np.repeat(self.microbatch_level, np.diff(self.microbatch_offsets))

    def pack_index(self, microbatch: int, rank: int) -> tuple[int, int]:
        """(pack, CP rank within it) of `rank` (0 .. num_ranks - 1) in a micro-batch."""
        cp_size = self.levels[self.microbatch_level[microbatch]].cp_size
        return int(self.microbatch_offsets[microbatch]) + rank // cp_size, rank % cp_size

    def counts(self) -> dict[str, int]:
        """Sequences, tokens, packs and steps, with everything that was dropped or cut."""
        counts = {
            "sequences_in": len(self.seq_lens),
            "sequences_kept": len(self.seq_lens) - len(self.dropped_ids),
            "sequences_dropped": len(self.dropped_ids),
            "sequences_truncated": len(self.truncated_ids),
            "tokens_in": self.tokens_in,
            "tokens_kept": int(self.seq_lens.sum(dtype=np.int64)),
            "tokens_dropped": self.tokens_dropped,
            "tokens_truncated": self.tokens_truncated,
            "packs": self.num_packs,
            "filler_packs": int((np.diff(self.pack_offsets) == 0).sum()),
            "microbatches": len(self.microbatch_level),
            "steps": self.num_steps,
            "sequences_carried": 0 if self.carried_ids is None else len(self.carried_ids),
        }
        for code, reason in enumerate(DROP_REASONS):
            counts[f"dropped: {reason}"] = int((self.dropped_reason == code).sum())
        return counts

    def metrics(self) -> dict[str, Any]:
        """The metrics of docs/design.md section 5, each with its lower bound."""
        return metrics_module.plan_metrics(
            seq_lens=self.seq_lens,
            sequence_ids=self.sequence_ids,
            pack_offsets=self.pack_offsets,
            microbatch_offsets=self.microbatch_offsets,
            microbatch_level=self.microbatch_level,
            pack_lens=np.array([level.pack_len for level in self.levels], dtype=np.int64),
            cp_sizes=np.array([level.cp_size for level in self.levels], dtype=np.int64),
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_stages=self.num_stages,
            source_ids=self.source_ids,
            cost=self.cost or DENSE_8B_H100,
        )

    def hash(self) -> str:
        """SHA-256 of the levels, the settings and every array; not of where the corpus lies."""
        digest = hashlib.sha256(_canonical_json(self._settings(hashed_only=True)))
        for name in _ARRAYS:
            array = getattr(self, name)
            if array is not None:
                digest.update(f"{name} {little_endian(array).dtype.str} {array.shape}".encode())
                digest.update(np.ascontiguousarray(little_endian(array)).data)
        return digest.hexdigest()

    def save(self, path: str | os.PathLike) -> None:
        """Writes the folder `path`, whole or not at all.

        The same plan already there is left alone. Raises ValueError when `path` is anything else.
        """
        document = {
            "format_version": FORMAT_VERSION,
            "hash": self.hash(),
            **self._settings(hashed_only=False),
            "epochs": self.epochs,
            "counts": self.counts(),
        }
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        save_folder(Path(path), document, arrays, self.metrics)

    @classmethod
    def load(cls, path: str | os.PathLike, *, verify: bool = True) -> "Plan":
        """Memory-maps a saved plan. Raises ValueError when it is missing, foreign or damaged.

        verify: recompute the hash over every byte (0.05 s for 10M sequences in the page cache).
        """
        folder = Path(path)
        document = load_document(folder, FORMAT_VERSION)
        try:
            settings = {
                f.name: document[f.name] for f in dataclasses.fields(cls) if f.name not in _ARRAYS
            }
            settings["levels"] = tuple(Level.parse(text) for text in settings["levels"])
            settings["alignment"] = Alignment(
                settings["alignment"]["budget_multiple"],
                tuple(settings["alignment"]["document_multiples"]),
            )
            if settings["cost"] is not None:
                settings["cost"] = PackCost(**settings["cost"])
            settings["corpus_paths"] = tuple(settings["corpus_paths"])
            if settings["source_weights"] is not None:
                settings["source_weights"] = tuple(settings["source_weights"])
            arrays = load_arrays(folder, _ARRAYS, _OPTIONAL)
        except (KeyError, TypeError, ValueError, EOFError, FileNotFoundError) as error:
            raise ValueError(f"the plan in {folder} is damaged ({error}); make it again") from None
        plan = cls(**settings, **arrays)
        if verify and plan.hash() != document.get("hash"):
            raise ValueError(
                f"the plan in {folder} does not match its hash: a file was cut or edited; make it "
                "again"
            )
        return plan

    def audit(self, seq_lens: np.ndarray | None = None) -> list[str]:
        """Checks every invariant; returns the violations in words, none when the plan is good.

        seq_lens: the planner's input lengths; with them the accounting is checked to the token.
        """
        return audit_plan(self, seq_lens)

    def _settings(self, *, hashed_only: bool) -> dict[str, Any]:
        settings: dict[str, Any] = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in _ARRAYS and not (hashed_only and f.name in _NOT_HASHED)
        }
        settings["levels"] = [str(level) for level in self.levels]
        settings["alignment"] = dataclasses.asdict(self.alignment)
        settings["cost"] = self.cost and dataclasses.asdict(self.cost)
        return settings


def _canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
