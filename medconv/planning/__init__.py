"""From a dataset's fingerprint and a memory budget to grid, patch, batch and network; stands between check and prepare."""

from medconv.planning.grid import across, slice_axis, target_spacing
from medconv.planning.memory import Budget, step_bytes
from medconv.planning.network import Network
from medconv.planning.overrides import PlanOverrides
from medconv.planning.plan import Plan, plan
from medconv.planning.words import table

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
