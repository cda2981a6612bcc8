"""Supported host versions, every version difference and every exception to "never reassign".

Nothing is patched by importing this module.
"""

import argparse
import importlib.util
from pathlib import Path

SUPPORTED = ("0.19",)


def host_version() -> str:
    """The version of the megatron-core that is imported: a wheel's or a checkout's.

    Raises RuntimeError when there is none.
    """
    if importlib.util.find_spec("megatron") is None:
        raise RuntimeError(
            "megatron-core is not installed; install the extra: pip install 'megatron_hbp[train]'"
        )
    from megatron.core.package_info import __version__

    return __version__


def check_host_version() -> None:
    """Raises RuntimeError unless the host is one that this release was tested with."""
    version = host_version()
    if not any(version == s or version.startswith(s + ".") for s in SUPPORTED):
        raise RuntimeError(
            f"megatron-core {version} is not supported; this release runs with "
            f"{', '.join(s + '.x' for s in SUPPORTED)}: "
            f"pip install 'megatron-core=={SUPPORTED[-1]}.*'"
        )


def use_bundled_dataset_helpers() -> None:
    """Keeps the host from calling `make` where its wheel brings no Makefile.

    `megatron.core.datasets.utils.compile_helpers` runs `make` beside itself and exits the process
    when that fails, although the wheel ships the compiled helpers. Delete when the wheel ships the
    Makefile or the call checks for the helpers first.
    """
    import megatron.core.datasets.utils as dataset_utils

    folder = Path(dataset_utils.__file__).parent
    if not (folder / "Makefile").exists() and any(folder.glob("helpers_cpp*.so")):
        dataset_utils.compile_helpers = lambda: None


def make_help_printable(parser: argparse.ArgumentParser) -> None:
    """Doubles bare % signs in help texts: in 0.19 `--help` ends in argparse's error over them."""
    for action in parser._actions:
        if action.help is None:
            continue
        try:
            _ = action.help % (vars(action) | {"prog": parser.prog})
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")
