"""Shared by all benchmarks: rows as JSON and as a table, and alternating timings."""

from __future__ import annotations

import json
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from medconv.utils.atomic_io import write_text

Row = dict[str, Any]


def conditions() -> Row:
    """Hardware and versions, for a row."""
    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    return {
        "device": "cuda" if cuda else "cpu",
        "hardware": name,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def alternate(
    variants: Mapping[str, Callable[[], Any]],
    reference: str,
    pairs: int,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Time variants in turn, in an order drawn anew each round, so that disturbances of the machine
    affect all of them.

    Args: clock: tells seconds.
    Returns: per variant `seconds` (median), `ratio` to the reference (median over rounds), and `spread` of
        that ratio (from the first to the third quartile).
    """
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        for _ in range(warm_up):
            run()
    order, dice = list(variants), random.Random(0)
    for _ in range(pairs):
        dice.shuffle(order)  # the variant before changes the caches
        for name in order:
            run = variants[name]
            synchronise()
            start = clock()
            run()
            synchronise()
            seconds[name].append(clock() - start)
    return {name: compared(times, seconds[reference]) for name, times in seconds.items()}


def compared(seconds: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """`seconds`, `ratio` and `spread`, as of `alternate`, from the times of two variants in the same
    rounds.
    """
    ratios = sorted(a / b for a, b in zip(seconds, reference, strict=True))
    spread = ratios[(3 * len(ratios)) // 4] - ratios[len(ratios) // 4]
    return {"seconds": median(seconds), "ratio": median(ratios), "spread": spread}


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
