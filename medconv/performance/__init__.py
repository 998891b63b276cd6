"""Speed: switches, and where the time goes."""

from medconv.performance.steps import StepTimer
from medconv.performance.switches import (
    apply_switches,
    checkpoint_blocks,
    memory_format,
    resolve_precision,
    warn_slow_cudnn,
)

__all__ = ["StepTimer", "apply_switches", "checkpoint_blocks", "memory_format", "resolve_precision", "warn_slow_cudnn"]
