"""The cores that this process may use."""

import os


def num_cores() -> int:
    """Those that Slurm or a container allows, not all of the machine, where a process can ask for them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS, Windows
