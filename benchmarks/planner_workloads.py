"""The length distributions of the planner's benchmark, from a folder outside this repository.

The folder holds workloads.py, whose make(name, n, cap) returns int64 [n] lengths in tokens, the
same for the same arguments:
- tulu: instruction rows and long documents, 3:2 by tokens, up to 131072;
- tulu_paper: the job of the HBP paper, 941,264 sequences, 1,920 of them long (n = 0: all of it);
- real: token lengths of public instruction rows and conversations, drawn n times;
- uniform32k: uniform over 1 .. 32768; identical: all 1000;
- half_plus: all just over cap / 2, so that no two fit together;
- ffd_worst: decreasing methods need 11/9 of the best number of packs.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np


class Workloads:
    """Lengths by name; what is made once is kept.

    Raises ValueError when the folder has no workloads.py.
    """

    def __init__(self, folder: Path) -> None:
        self._module = _load(folder)
        self._made: dict[tuple[str, int, int], np.ndarray] = {}

    def lengths(self, name: str, n: int, cap: int = 131072) -> np.ndarray:
        """int64 [n], tokens; not to be changed."""
        key = (name, n, cap)
        if key not in self._made:
            made = self._module.make(name, n, cap)
            made.flags.writeable = False
            self._made[key] = made
        return self._made[key]

    def large(self, name: str, n: int) -> np.ndarray:
        """As lengths(), for arrays that are too large to keep."""
        return self._module.make(name, n)


def _load(folder: Path) -> ModuleType:
    path = folder / "workloads.py"
    if not path.is_file():
        raise ValueError(
            f"{path} is missing; it makes the lengths to plan: name its folder with --workloads"
        )
    specification = importlib.util.spec_from_file_location("planner_bench_workloads", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
