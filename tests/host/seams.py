"""Finds, in the source of our host folder, every name of the host that it uses, and checks it.

Read from the syntax tree, so that a new use cannot be forgotten.
"""

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any


def imported_names(tree: ast.Module, package: str) -> dict[str, str]:
    """Local name -> dotted name, of everything imported from a package, also inside functions."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _inside(node.module or "", package):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _inside(alias.name, package):
                    assert alias.asname, f"import {alias.name} needs a name of its own"
                    names[alias.asname] = alias.name
    return names


def host_problems(source: str) -> list[str]:
    """What a module asks of megatron that the installed one has not: names, then keywords."""
    tree = ast.parse(source)
    names = imported_names(tree, "megatron")
    problems = []
    for dotted in names.values():
        try:
            resolve(dotted)
        except (ImportError, AttributeError) as error:
            problems.append(f"{dotted}: {error}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            problems += _attribute_problems(node, names)
        elif isinstance(node, ast.Call):
            problems += _call_problems(node, names)
    return problems


def resolve(dotted: str) -> Any:
    """The object behind a dotted name."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if error.name and ".".join(parts[:end]).startswith(error.name):
                continue
            raise
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise ImportError(f"no module {dotted}")


def attributes_of(tree: ast.AST, owners: set[str]) -> set[str]:
    """Names X of `owner.X` and `getattr(owner, "X")`, for owners written as in the source."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners:
            found.add(node.attr)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "getattr"
            and ast.unparse(node.args[0]) in owners
            and isinstance(node.args[1], ast.Constant)
        ):
            found.add(node.args[1].value)
    return found


def sources(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py"))}


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    """The host's dotted name behind an expression like `parallel_state.create_group`."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, names)
        return owner and f"{owner}.{node.attr}"
    return None


def _attribute_problems(node: ast.Attribute, names: dict[str, str]) -> list[str]:
    dotted = _dotted(node, names)
    if dotted is None or isinstance(node.ctx, ast.Store):
        return []
    try:
        resolve(dotted)
    except (ImportError, AttributeError) as error:
        return [f"line {node.lineno}: {dotted}: {error}"]
    return []


def _call_problems(node: ast.Call, names: dict[str, str]) -> list[str]:
    dotted = _dotted(node.func, names)
    if dotted is None:
        return []
    try:
        signature = inspect.signature(resolve(dotted))
    except (ImportError, AttributeError, ValueError):
        return []  # named already, or without a signature
    unpacks = any(isinstance(a, ast.Starred) for a in node.args)
    keywords = {k.arg: None for k in node.keywords if k.arg is not None}
    partial = unpacks or len(keywords) < len(node.keywords)
    positional = [None] * sum(not isinstance(a, ast.Starred) for a in node.args)
    try:
        (signature.bind_partial if partial else signature.bind)(*positional, **keywords)
    except TypeError as error:
        return [f"line {node.lineno}: {dotted}{signature}: {error}"]
    return []
