"""Hierarchical balance packing for supervised fine-tuning with Megatron-LM.

Importing this package has no side effect and needs neither torch nor Megatron.
"""

from megatron_hbp.level import Level
from megatron_hbp.plan import Plan
from megatron_hbp.planner import build_plan, plan_batch

__all__ = ["Level", "Plan", "build_plan", "plan_batch"]
