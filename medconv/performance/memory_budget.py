"""The memory budget of a training step on this machine; rounded, so that similar machines plan the same."""

import os
from contextlib import suppress
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
_MAX_GB = {"gpu": 24.0, "cpu": 1.0}
_CGROUPS = Path("/sys/fs/cgroup")


def measured_gb(accelerator: str, processes: int) -> tuple[float, str]:
    """Memory for a step on one device in GiB, rounded down, and a text that says where it comes from.

    It is a share of the total memory, not of the free memory, so that the same command plans the same again;
    with several GPUs the smallest counts.

    Args:
        accelerator: Lightning's `accelerator`.
        processes: that share a CPU's memory.
    """
    if uses_gpu(accelerator):
        devices = range(torch.cuda.device_count())
        total_bytes = [torch.cuda.get_device_properties(device).total_memory for device in devices]
        return usable_gb("gpu", min(total_bytes))
    return usable_gb("cpu", total_memory(), processes)


def usable_gb(kind: str, total_bytes: float, processes: int = 1) -> tuple[float, str]:
    """As `measured_gb`, for a given total.

    Args:
        kind: gpu or cpu.
        total_bytes: of the device, or of main memory.
        processes: that share it.
    """
    # the largest step that fits: a plan then does not depend on a few MB more or less
    usable = _SHARE[kind] * total_bytes / _GB / processes
    bounded = min(usable, _MAX_GB[kind])
    step_gb = max((step for step in _STEPS_GB if step <= bounded), default=_STEPS_GB[0])
    installed = f"{total_bytes / _GB:.3g} GB"
    if usable >= _MAX_GB[kind]:
        source = f"the most medconv uses on a {kind.upper()} ({installed} installed)"
    else:
        source = f"{100 * _SHARE[kind]:g} % of {installed} of {kind.upper()} memory"
    if processes > 1:
        source += f", {processes} processes"
    return float(step_gb), source


def total_memory(cgroups: Path = _CGROUPS, process_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of main memory, or the lowest limit of this process's control groups (containers, Slurm).

    Args:
        cgroups: where the kernel shows all groups.
        process_cgroup: which of them this process is in: lines of `number:controllers:path`.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        lines = process_cgroup.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2: one tree for all controllers
            root = cgroups
            file_name = "memory.max"
        elif "memory" in controllers.split(","):  # version 1: a tree for each
            root = cgroups / "memory"
            file_name = "memory.limit_in_bytes"
        else:
            continue
        innermost = root / group.lstrip("/")
        # In a container the path may be the host's, which does not exist here; its root is the container's
        for folder in (root, innermost, *innermost.parents):
            if folder.is_relative_to(root):
                with suppress(OSError, ValueError):  # no such group, or no limit
                    limits.append(int((folder / file_name).read_text()))
    return min(limit for limit in limits if limit)
