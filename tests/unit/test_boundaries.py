"""Who may import what, and README's layout tree and flag table against the code."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hbp.config import HbpConfig, field_docs, flag_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_hbp"


def _imports(file: Path) -> set[str]:
    """Dotted names that a file imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _importers(of: str) -> set[str]:
    return {
        file.relative_to(ROOT).as_posix()
        for folder in ("megatron_hbp", "examples", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
        if any(name == of or name.startswith(of + ".") for name in _imports(file))
    }


def _loaded_by(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.split(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "statement",
    ["import megatron_hbp", "import megatron_hbp.cli", "import megatron_hbp.config"],
)
def test_importing_the_package_needs_neither_torch_nor_megatron(statement):
    loaded = _loaded_by(statement)
    assert "megatron_hbp" in loaded
    assert not loaded & {"torch", "megatron", "transformers", "tokenizers"}


def test_importing_the_entry_point_does_not_import_megatron():
    """The CPU runtime must come first, so the entry point decides when."""
    assert "megatron" not in _loaded_by("import megatron_hbp.host.pretrain_gpt")


def test_megatron_is_imported_in_host_only():
    assert _importers("megatron")
    outside = {name for name in _importers("megatron") if not name.startswith("megatron_hbp/host/")}
    assert not {name for name in outside if name.startswith("megatron_hbp/")}


def test_torch_is_imported_by_the_data_set_and_the_host_only():
    in_package = {name for name in _importers("torch") if name.startswith("megatron_hbp/")}
    assert {n for n in in_package if not n.startswith("megatron_hbp/host/")} == {
        "megatron_hbp/dataset.py"
    }


def test_dependencies_point_one_way():
    """host -> dataset, sampler -> planner -> packing, balance, schedule -> plan, metrics."""
    below_planner = "packing balance mixing schedule metrics config level alignment cost".split()
    below_planner += "kept weights randomness placement plan_inputs".split()
    users = {n for n in _importers("megatron_hbp.host") if n.startswith("megatron_hbp/")}
    assert not {n for n in users if not n.startswith("megatron_hbp/host/")}
    for name in (*below_planner, "plan", "planner"):
        imported = _imports(PACKAGE / f"{name}.py")
        ours = {other.split(".")[1] for other in imported if other.startswith("megatron_hbp.")}
        forbidden = {"host", "dataset", "sampler", "normalizer", "corpus", "cli", "report"}
        if name != "planner":
            forbidden |= {"planner"}
        assert not ours & forbidden, name


def _readme() -> str:
    file = ROOT / "README.md"
    if not file.exists():
        pytest.skip("README.md is not written yet")
    return file.read_text(encoding="utf-8")


def test_readme_lists_every_flag_once():
    """Table rows that start with | `--hbp-name`."""
    rows = re.findall(r"^\| *`(--hbp-[a-z-]+)", _readme(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(flag_name(name) for name in field_docs(HbpConfig))


def _layout_paths(text: str) -> set[str]:
    """Paths of the code block under a heading with the word Layout.

    A line is `names  description`: two spaces or more end the names, indentation is the folder.
    """
    block = re.search(r"^#+ .*[Ll]ayout.*?^```[a-z]*\n(.*?)^```", text, flags=re.M | re.S)
    assert block, "README has no code block under its Layout heading"
    paths, folders = set(), [(-1, "")]
    for line in block[1].splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        while folders[-1][0] >= indent:
            folders.pop()
        for name in re.split(r" {2,}", line.strip())[0].split():
            path = folders[-1][1] + name
            paths.add(path)
            if name.endswith("/"):
                folders.append((indent, path))
    return paths


def test_readme_layout_is_the_tree():
    """Every named path exists, and no top-level folder or module of the package is missing."""
    named = _layout_paths(_readme())
    assert not {path for path in named if not (ROOT / path).exists()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout, so the tree is not known")
    wanted = {path.split("/")[0] + "/" for path in tracked if "/" in path if path[0] != "."}
    wanted |= {
        path
        for path in tracked
        if re.fullmatch(r"megatron_hbp/(host/)?[a-z0-9_]+\.py", path)
        and not path.endswith("__init__.py")
    }
    assert not wanted - named
