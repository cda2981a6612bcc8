"""The child of `hbp check`, asked by tests: one process for each question."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_hbp.check.facts import Facts, Question


def ask(folder: Path, flags: list[str], gpus: int, **question: Any) -> Facts:
    """question: fields of Question that differ from one H100 node's."""
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {
        "gpus_per_node": 8,
        "capability": (9, 0),
        "transformer_engine": "2.8",
        "lengths": None,
    }
    asked = Question(flags=flags, gpus=gpus, workspace=str(folder), **known | question)
    command = [sys.executable, "-m", "megatron_hbp.host.preflight", str(asked.save())]
    subprocess.run(command, check=True, timeout=120)
    facts = Facts.load(folder)
    assert facts is not None
    return facts
