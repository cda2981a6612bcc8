"""Looks for objects of megatron_hbp that were put into the host's modules and classes."""

import importlib
import inspect
import pkgutil
import sys
from typing import Any

import megatron_hbp


def ours_in_the_host() -> tuple[list[str], int]:
    """Names of host attributes that are ours, and how many host modules were looked through."""
    for module in pkgutil.walk_packages(megatron_hbp.__path__, "megatron_hbp."):
        if not module.name.endswith("te_attention"):  # needs transformer-engine
            importlib.import_module(module.name)
    host = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "megatron"}
    found = []
    for name, module in host.items():
        for attribute, value in list(vars(module).items()):
            if _is_ours(value):
                found.append(f"{name}.{attribute}")
            if inspect.isclass(value) and value.__module__.startswith("megatron."):
                found += [
                    f"{name}.{attribute}.{member}"
                    for member, inner in list(vars(value).items())
                    if _is_ours(inner)
                ]
    return sorted(set(found)), len(host)


def _is_ours(value: Any) -> bool:
    module = str(getattr(getattr(value, "__func__", value), "__module__", ""))
    # the CPU runtime's stand-ins for torch functions reach the host by its own imports of torch
    return module.split(".", maxsplit=1)[0] == "megatron_hbp" and module != "megatron_hbp.host.cpu"
