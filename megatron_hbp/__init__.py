"""Hierarchical balance packing for supervised fine-tuning with Megatron-LM.

Importing this package has no side effect and needs neither torch nor Megatron.
"""

from megatron_hbp.plan import Level, Plan
from megatron_hbp.planner import build_plan

__all__ = ["Level", "Plan", "build_plan"]
