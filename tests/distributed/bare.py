"""Trains the stock model in a process that never imports megatron_hbp.

python -m tests.distributed.bare FLAGS...: prints the losses and the hash of jobs_stock.pretrain as
one JSON line. The CPU runtime is loaded from its file, not from its package.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch


def _install_cpu_runtime() -> None:
    path = Path(__file__).resolve().parents[2] / "megatron_hbp" / "host" / "cpu.py"
    spec = importlib.util.spec_from_file_location("cpu_runtime", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()


if __name__ == "__main__":
    flags = sys.argv[1:]
    _install_cpu_runtime()
    torch.set_num_threads(1)
    from tests.distributed.jobs_stock import pretrain

    result = pretrain(flags)
    assert "error" not in result, result["error"]
    assert not [name for name in sys.modules if name.startswith("megatron_hbp")]
    print("RESULT " + json.dumps({"losses": result["losses"], "hash": result["hash"]}))
