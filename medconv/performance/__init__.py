"""What makes a training step fast: switches, activation checkpointing, the step profiler and the
bottleneck report.
"""

from medconv.performance.bottleneck import verdict
from medconv.performance.step_profiler import StepProfiler, Trace
from medconv.performance.switches import apply_switches, memory_format

__all__ = ["StepProfiler", "Trace", "apply_switches", "memory_format", "verdict"]
