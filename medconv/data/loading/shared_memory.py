"""Shared memory, through which loader workers send their batches: what they need, and what there is."""

import os
from collections.abc import Iterable
from pathlib import Path

from medconv.data.preprocessing.store import Entry
from medconv.utils.errors import Argument, ArgumentError

SHARED = Path("/dev/shm")


def patch_bytes(entry: Entry, voxels: float) -> float:
    """Of a training sample with this number of voxels, with its label map. Args: entry: any prepared case."""
    per_voxel = len(entry.image) * entry.image.itemsize
    if entry.label.size:
        label = entry.training_label
        per_voxel += len(label) * label.itemsize
    return voxels * per_voxel


def largest_case_bytes(entries: Iterable[Entry]) -> int:
    """Of a whole case for validation; its reference on the original grid counts as a second label map."""
    return max(map(_case_bytes, entries), default=0)


def _case_bytes(entry: Entry) -> int:
    label = entry.training_label
    return entry.image.nbytes + label.nbytes + entry.label.nbytes


def check_room(worker_bytes: float, num_workers: int, processes: int = 1, folder: Path = SHARED) -> None:
    """Check that the batches which workers keep ready fit.

    Without this check, torch loses a batch when the memory is full, and the training waits for it forever.

    Args:
        worker_bytes: of the batches that each worker keeps ready.
        processes: of this machine, each with `num_workers` workers.
    Raises:
        ArgumentError: they do not fit.
    """
    if not num_workers or not folder.is_dir():  # macOS has other shared memory
        return
    file_system = os.statvfs(folder)
    free = file_system.f_bavail * file_system.f_frsize
    needed = worker_bytes * num_workers * processes
    if needed <= free:
        return
    workers = f"={num_workers}" if processes == 1 else f"={num_workers} in each of {processes} processes"
    raise ArgumentError(
        "num_workers",
        f"{workers}: the batches that they keep ready need about {_size(needed)} in {folder}, and "
        f"{_size(free)} are free. A container gets more by `docker run --shm-size={_gigabytes(needed)}g`; or "
        "take fewer workers, or a smaller ",
        Argument("prefetch_factor"),
        " or ",
        Argument("batch_size"),
    )


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _gigabytes(count: float) -> int:
    """Twice as much, for what else uses it; rounded up."""
    return int(2 * count / 2**30) + 1
