"""What the child of `hbp check` finds out with the host: written as JSON, read by the parent.

Guarantees (asserted by tests/unit/test_check_facts.py): what is written comes back equal.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the child is asked.

    flags: the run's command line. gpus: of the run. capability: the compute capability of its GPUs.
    transformer_engine: the release that the cluster has. lengths: an .npy file to plan from when
    the run's corpora are not here. workspace: an empty folder for the answer, the plan and a log.
    """

    flags: list[str]
    gpus: int
    gpus_per_node: int
    capability: tuple[int, int]
    transformer_engine: str
    lengths: str | None
    workspace: str

    def save(self) -> Path:
        """The question's file, in the workspace."""
        path = Path(self.workspace) / "question.json"
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Question":
        document = json.loads(Path(path).read_text())
        return cls(**document | {"capability": tuple(document["capability"])})


@dataclass(frozen=True, kw_only=True)
class StageFacts:
    """One pipeline stage as the host built it, on one of its GPUs.

    chunk_dense_layers, chunk_moe_layers: of each virtual stage. dense_parameters: all but routed
    experts; expert_parameters: routed experts. unique_dense, unique_experts: of the whole stage, no
    copy counted twice.
    """

    chunk_dense_layers: tuple[int, ...]
    chunk_moe_layers: tuple[int, ...]
    dense_parameters: int
    expert_parameters: int
    unique_dense: int
    unique_experts: int


@dataclass(kw_only=True)
class Facts:
    """The answer, filled in section by section.

    problems: why the run would not start. notes: what could not be looked at here. arguments: the
    host's, as validated; empty when they are refused. stages: as built, empty when one cannot be.
    groups: global ranks of the process groups of each of rank_layout.GROUP_KINDS. plan: its folder,
    None when there is none to look at. plan_from: "plan", "corpus" or "lengths". steps_done: by
    the host's count, those of a replanned run's earlier plans too, in the checkpoint that it would
    go on from.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    stages: list[StageFacts] = field(default_factory=list)
    groups: dict[str, list[list[int]]] = field(default_factory=dict)
    plan: str | None = None
    plan_from: str | None = None
    steps_done: int = 0

    def save(self, workspace: str | Path) -> None:
        """Writes the answer into the workspace."""
        path = Path(workspace) / "facts.json"
        path.with_suffix(".tmp").write_text(json.dumps(dataclasses.asdict(self)))
        path.with_suffix(".tmp").rename(path)

    @classmethod
    def load(cls, workspace: str | Path) -> "Facts | None":
        """The answer in a workspace; None when the child has left none."""
        path = Path(workspace) / "facts.json"
        if not path.is_file():
            return None
        document = json.loads(path.read_text())
        stages = [_stage(stage) for stage in document["stages"]]
        return cls(**document | {"stages": stages})


def _stage(document: dict[str, Any]) -> StageFacts:
    layers: dict[str, Any] = {
        name: tuple(document[name]) for name in ("chunk_dense_layers", "chunk_moe_layers")
    }
    return StageFacts(**document | layers)
