"""Shared by all benchmarks: rows as JSON and as a table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from medconv.utils.atomic_io import write_text

Row = dict[str, Any]


def conditions(device: str | None = None) -> Row:
    """Hardware and versions, for a row. Args: device: that computed; None: a GPU if there is one."""
    cuda = torch.cuda.is_available() and device != "cpu"
    name = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    return {
        "device": "cuda" if cuda else "cpu",
        "hardware": name,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def kernel_seconds(run: Callable[[], Any], times: int = 10) -> float:
    """Seconds that the device itself works in one call; wall time beyond that is launching and waiting.
    CUDA only.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / times / 1e6


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Rows as a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(
        [*lines, *("| " + " | ".join(_shown(row.get(column)) for column in columns) + " |" for row in rows)]
    )


def by(numbers: Sequence[float]) -> str:
    """Sizes in words: 40x56x40."""
    return "x".join(f"{n:g}" for n in numbers)


def write(rows: Sequence[Row], path: Path) -> None:
    """The rows as JSON, written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(list(rows), indent=1) + "\n")


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
