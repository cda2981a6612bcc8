"""Recipes: a whole run as one TOML file, its flags being Megatron's own and ours.

    include = ["models/deepseek-v2.toml", "sft.toml"]    # read first, in this order
    title = "DeepSeek-V2 on 256 H100"
    [cluster]
    gpus = 256
    gpus_per_node = 8
    device = "h100-80gb"                # hardware.py, or a JSON file beside the recipe
    transformer_engine = "2.8"          # the release that the cluster has
    [published]
    parameters = 235.7e9
    active_parameters = 21.4e9
    source = "https://..."
    [data]
    lengths = "lengths/paper.csv"       # what the levels were chosen for
    select = "hbp select ..."           # the command that chose them
    [flags]
    num-layers = 60
    swiglu = true                       # a flag without a value; false takes it away
    hbp-level = ["16384:1", "131072:8"] # --hbp- flags are repeated, others get all words

Guarantees (asserted by tests/unit/test_recipe.py):
- what a file says wins over what it includes; a key that no recipe has is an error with its file;
- flags come out in the order of the files, each once; those added on the command line come last.
Nothing here knows which flags exist.
"""

import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Value = str | int | float | bool | list[str | int | float]

_TABLES = {
    "cluster": {"gpus": int, "gpus_per_node": int, "device": str, "transformer_engine": str},
    "published": {"parameters": float, "active_parameters": float, "source": str},
    "data": {"lengths": str, "select": str},
}
_DEEPEST = 8  # includes of includes; deeper ones include themselves


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """gpus: of the whole run. device: a name of hardware.py or a JSON file. transformer_engine: its
    release on the cluster. parameters, active_parameters: published counts, None where none are
    known. lengths: a file for `hbp select --lengths`. flags: without dashes in front, in order.
    """

    name: str
    path: Path
    title: str
    gpus: int
    gpus_per_node: int = 8
    device: str
    transformer_engine: str = "2.8"
    parameters: float | None = None
    active_parameters: float | None = None
    source: str = ""
    lengths: Path | None = None
    select: str = ""
    flags: dict[str, Value]

    def command_line(self, more: Sequence[str] = ()) -> list[str]:
        """Words for the host's parser. `more`: flags that win over the recipe's, in its form."""
        return [*flag_words(without(self.flags, more)), *more]


def read_recipe(path: str | Path) -> Recipe:
    """Raises ValueError, with the file, for what is missing, unknown or of another kind."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(
            f"recipe {path} is no file; give a path such as examples/recipes/llama-3.1-8b.toml"
        )
    document = _merged(file, 0)
    for table, key in (("cluster", "gpus"), ("cluster", "device")):
        if key not in document[table]:
            raise ValueError(f"recipe {file}: {key} is missing in [{table}]; add it")
    recipe = Recipe(
        name=file.stem,
        path=file,
        title=document["title"] or file.stem,
        flags=document["flags"],
        **document["cluster"],
        **document["published"],
        **document["data"],
    )
    for key in ("gpus", "gpus_per_node"):
        if getattr(recipe, key) < 1:
            raise ValueError(
                f"recipe {file}: {key} is {getattr(recipe, key)}; give a whole number of 1 or more"
            )
    return recipe


def with_gpus(recipe: Recipe, gpus: int | None) -> Recipe:
    """The recipe for another number of GPUs; as it is for None. Raises ValueError below 1."""
    if gpus is None:
        return recipe
    if gpus < 1:
        raise ValueError(f"--gpus is {gpus}; give a whole number of 1 or more")
    return dataclasses.replace(recipe, gpus=gpus)


def flag_words(flags: dict[str, Value]) -> list[str]:
    """Flags as words: True is the flag alone, False nothing, --hbp- lists repeat the flag."""
    words: list[str] = []
    for name, value in flags.items():
        flag = f"--{name}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list) and name.startswith("hbp-"):
            words += [word for item in value for word in (flag, _text(item))]
        elif isinstance(value, list):
            words += [flag, *map(_text, value)]
        elif value is not False:
            words += [flag, _text(value)]
    return words


def without(flags: dict[str, Value], more: Sequence[str]) -> dict[str, Value]:
    """Flags that `more` does not give anew."""
    given = {word.removeprefix("--").partition("=")[0] for word in more if word.startswith("--")}
    return {name: value for name, value in flags.items() if name not in given}


def _text(value: str | int | float) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _merged(file: Path, depth: int) -> dict[str, Any]:
    """The tables of a file over those that it includes."""
    if depth > _DEEPEST:
        raise ValueError(f"recipe {file}: includes go round in a circle; take one out")
    try:
        own = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"recipe {file} cannot be read: {error}") from None
    unknown = sorted(set(own) - {"include", "title", "flags", *_TABLES})
    if unknown:
        raise ValueError(
            f"recipe {file}: {unknown[0]!r} is unknown; a recipe has include, title, "
            f"{', '.join(f'[{table}]' for table in _TABLES)} and [flags]"
        )
    merged: dict[str, Any] = {"title": "", "flags": {}} | {table: {} for table in _TABLES}
    includes = own.get("include", [])
    if not isinstance(includes, list) or not all(isinstance(name, str) for name in includes):
        raise ValueError(f"recipe {file}: include is {includes!r}; give a list of files")
    for name in includes:
        included = file.parent / name
        if not included.is_file():
            raise ValueError(f"recipe {file} includes {name}, which is no file beside it")
        below = _merged(included, depth + 1)
        for table in ("flags", *_TABLES):
            merged[table] |= below[table]
        merged["title"] = below["title"] or merged["title"]
    if not isinstance(own.get("title", ""), str):
        raise ValueError(f"recipe {file}: title is {own['title']!r}; give a text")
    merged["title"] = own.get("title", merged["title"])
    for table in ("flags", *_TABLES):
        mine = own.get(table, {})
        if not isinstance(mine, dict):
            raise ValueError(f"recipe {file}: {table} is {mine!r}; make it a table [{table}]")
        checked = _flags(file, mine) if table == "flags" else _table(file, table, mine)
        merged[table] |= checked
    return merged


def _table(file: Path, table: str, own: dict[str, Any]) -> dict[str, Any]:
    known = _TABLES[table]
    found: dict[str, Any] = {}
    for key, value in own.items():
        if key not in known:
            raise ValueError(
                f"recipe {file}: {key!r} is unknown in [{table}]; it has {', '.join(known)}"
            )
        kind = known[key]
        right = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if not right or isinstance(value, bool):
            wanted = {int: "a whole number", float: "a number", str: "a text"}[kind]
            raise ValueError(f"recipe {file}: {key} is {value!r} in [{table}]; give {wanted}")
        beside = file.parent / str(value)
        if key == "lengths":
            found[key] = beside
        elif key == "device" and beside.is_file():
            found[key] = str(beside)
        else:
            found[key] = value
    return found


def _flags(file: Path, own: dict[str, Any]) -> dict[str, Value]:
    for name, value in own.items():
        items = value if isinstance(value, list) else [value]
        plain = all(isinstance(item, str | int | float) for item in items) and items
        if not plain or (isinstance(value, list) and any(isinstance(i, bool) for i in items)):
            raise ValueError(
                f"recipe {file}: flag {name} is {value!r}; give a text, a number, true, false or a "
                "list of texts and numbers"
            )
        # two of Megatron's flags have both, such as override-opt_param-scheduler
        if name.startswith("-") or ("_" in name and "-" not in name):
            raise ValueError(
                f"recipe {file}: flag {name!r}; write it without dashes in front and with dashes "
                f"for underscores: {name.lstrip('-').replace('_', '-')}"
            )
    return own
