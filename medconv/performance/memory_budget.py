"""The memory budget of a training step on this machine; rounded, so that similar machines plan the same."""

import os
from pathlib import Path

import torch

from medconv.utils.hardware import uses_gpu

_GB = 2**30
_STEPS_GB = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
# Share of all memory. A GPU also holds CUDA itself, convolution workspace and fragmentation; main memory
# also holds the loader's workers, the page cache and other programs.
_SHARE = {"gpu": 0.8, "cpu": 0.5}
# Upper limits, because more memory means larger patches. On a CPU time is the limit: 1 GB is about a second
# per step. On a GPU, going from 23 to 37 GB gave nnU-Net 0.02 points of Dice, averaged over six datasets, in
# twice the time (Isensee et al. 2024, arXiv:2404.09556).
_MOST_GB = {"gpu": 24.0, "cpu": 1.0}
_CGROUPS = Path("/sys/fs/cgroup")


def measured_gb(accelerator: str, processes: int) -> tuple[float, str]:
    """Memory for a step on one device in GiB, rounded down, and a text that says where it comes from.

    It is a share of the total memory, not of the free memory, so that the same command plans the same again;
    with several GPUs the smallest counts. Args: processes: processes that share a CPU's memory.
    """
    if uses_gpu(accelerator):
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        return usable_gb("gpu", min(sizes))
    return usable_gb("cpu", total_memory(), processes)


def usable_gb(kind: str, total_bytes: float, processes: int = 1) -> tuple[float, str]:
    """As `measured_gb`, for a given total. Args: kind: gpu or cpu."""
    raw = _SHARE[kind] * total_bytes / _GB / processes
    bounded = min(raw, _MOST_GB[kind])
    step_gb = max((step for step in _STEPS_GB if step <= bounded), default=_STEPS_GB[0])
    among = f", {processes} processes" if processes > 1 else ""
    words = f"of {total_bytes / _GB:.3g} GB of {kind.upper()} memory{among}"
    return float(step_gb), f"measured, {words}{', as much as is ever taken' if raw >= _MOST_GB[kind] else ''}"


def total_memory(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of main memory, or the lowest limit of this process's control groups (containers, Slurm)."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, place in groups:
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups  # version 1, version 2
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        inner = root / place.lstrip("/")
        limits += [_limit(folder / name) for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
        limits.append(_limit(root / name))
    return min(limit for limit in limits if limit)


def _limit(path: Path) -> int:
    """Bytes; 0 where there is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
