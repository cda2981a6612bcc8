"""Hierarchical balance packing for supervised fine-tuning with Megatron-LM.

Importing this package has no side effect and needs neither torch nor Megatron.
"""

try:
    from megatron_hbp import _C as _C
except ImportError as error:
    raise ImportError(
        "megatron_hbp._C, the compiled planner kernels, cannot be imported; build them in the "
        "repository with: pip install pybind11 && pip install -e . --no-deps --no-build-isolation"
    ) from error

from megatron_hbp.level import Level
from megatron_hbp.plan import Plan
from megatron_hbp.planner import build_plan, plan_batch

__all__ = ["Level", "Plan", "build_plan", "plan_batch"]
