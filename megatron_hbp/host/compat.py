"""Supported host versions, every version difference and every exception to "never reassign".

Nothing is patched by importing this module.
"""

import argparse
import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

SUPPORTED = ("0.19",)
# Releases of Transformer Engine that brought kernels which the host imports; the others are older.
_TE_KERNELS = {
    "fused_permute": "2.1.0",
    "fused_permute_with_probs": "2.1.0",
    "fused_unpermute": "2.1.0",
    "fused_sort_chunks_by_index": "2.1.0",
    "fused_sort_chunks_by_index_with_probs": "2.1.0",
    "fused_permute_and_pad_with_probs": "2.12.0",
    "fused_topk_with_score_function": "2.7.0.dev0",
    "fused_compute_score_for_moe_aux_loss": "2.7.0.dev0",
    "fused_moe_aux_loss": "2.7.0.dev0",
}


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


def assume_transformer_engine(release: str) -> None:
    """Lets the host validate flags as on a machine that has Transformer Engine `release`.

    For `hbp check`, whose process builds models on the meta device and runs none of them. The host
    asks two ways: for the version that megatron.core.utils keeps, and for whether names that it
    imports from the extension are None. Where the real one is installed nothing changes.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    from megatron.core import utils as core_utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    core_utils._te_version = Version(release)
    for module in (moe_utils, rope_utils):
        for name in [n for n in vars(module) if n.startswith("fused_")]:
            there = Version(release) >= Version(_TE_KERNELS.get(name, "0"))
            if getattr(module, name) is None and there:
                setattr(module, name, _only_assumed)


@contextlib.contextmanager
def assumed_fused_adam() -> Iterator[None]:
    """Inside, the host finds the optimizer of Transformer Engine, as a signature only.

    OptimizerConfig asks for the arguments that --use-precision-aware-optimizer needs. Where the
    real one is installed nothing changes.
    """
    if importlib.util.find_spec("transformer_engine") is not None:
        yield
        return
    name = "transformer_engine.pytorch.optimizers"
    module: Any = types.ModuleType(name)
    module.FusedAdam = _AssumedAdam
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]


class _AssumedAdam:
    def __init__(
        self,
        *,
        master_weight_dtype: Any,
        exp_avg_dtype: Any,
        exp_avg_sq_dtype: Any,
        use_decoupled_grad: bool,
    ) -> None:
        _only_assumed()


def open_no_logs() -> None:
    """Lets the host parse a command line without opening its logs, for `hbp check`.

    Parsing creates the writers of the last rank: a folder of TensorBoard, a run of Weights & Biases
    on the network.
    """
    from megatron.training import global_vars

    for name in ("_set_tensorboard_writer", "_set_wandb_writer", "_set_one_logger"):
        assert hasattr(global_vars, name)
        setattr(global_vars, name, _nothing)


def _nothing(args: Any) -> None: ...


def _only_assumed(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("Transformer Engine is only assumed here")
