"""From a dataset's fingerprint and a memory budget to spacing, patch, batch and network topology."""

from medconv.planning.memory_model import Budget, step_bytes
from medconv.planning.overrides import PlanOverrides
from medconv.planning.planner import Plan, plan
from medconv.planning.report import table
from medconv.planning.spacing import across, slice_axis, target_spacing
from medconv.planning.topology import Network

__all__ = [
    "Budget",
    "Network",
    "Plan",
    "PlanOverrides",
    "across",
    "plan",
    "slice_axis",
    "step_bytes",
    "table",
    "target_spacing",
]
