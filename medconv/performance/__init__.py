"""Speed: switches, what the hardware can do, the choice between them, and where the time goes."""

from medconv.performance.hardware import (
    apply_backends,
    benchmark_kernels,
    check_devices,
    memory_advice,
    resolve_precision,
    without_effect,
)
from medconv.performance.memory import naming_memory
from medconv.performance.steps import StepProfiler, Trace
from medconv.performance.switches import apply_switches, memory_format
from medconv.performance.verdict import verdict

__all__ = [
    "StepProfiler",
    "Trace",
    "apply_backends",
    "apply_switches",
    "benchmark_kernels",
    "check_devices",
    "memory_advice",
    "memory_format",
    "naming_memory",
    "resolve_precision",
    "verdict",
    "without_effect",
]
