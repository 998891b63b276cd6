"""What torch.profiler says of waiting for the device, and of where it computes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import profile

# `cudaEventSynchronize` is none: it waits for the step before, while the device goes on with this one.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")


def waits(folder: Path) -> dict[str, Any]:
    """`waits in a step`, `steps in the trace`, and `where`: the operations around them, with their number.

    Raises: FileNotFoundError: no trace there.
    """
    file = next(folder.glob("*.pt.trace.json"), None)
    if file is None:
        raise FileNotFoundError(f"no trace in {folder}")
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    found = [event for event in events if event["name"] in _WAITS and _within(event, steps)]
    around = Counter(_around(event, events) for event in found)
    named = ", ".join(f"{name} ({number})" for name, number in around.most_common(5))
    steps_in = len({step["name"] for step in steps})
    return {"waits in a step": len(found) / max(1, steps_in), "steps in the trace": steps_in, "where": named}


def dearest(call: Callable[[], Any], number: int = 5) -> str:
    """Microseconds of all kernels of a call, their number, and those that take longest; "" on a CPU.

    Args: number: of kernels that are named.
    """
    with profile() as traced:
        call()
    kernels = [
        event
        for event in traced.key_averages()
        if event.device_type.name == "CUDA" and not event.is_user_annotation  # which lasts as its kernels do
    ]
    if not kernels:
        return ""
    kernels.sort(key=lambda event: event.self_device_time_total, reverse=True)
    total = sum(event.self_device_time_total for event in kernels)
    launches = sum(event.count for event in kernels)
    longest = kernels[:number]
    named = [f"{event.key[:60]} ({event.count}) {event.self_device_time_total:.0f}" for event in longest]
    return f"{total:.0f} microseconds in {launches} kernels: {'; '.join(named)}"


def _within(event: dict[str, Any], steps: list[dict[str, Any]]) -> bool:
    return any(step["ts"] <= event["ts"] < step["ts"] + step["dur"] for step in steps)


def _around(event: dict[str, Any], events: list[dict[str, Any]]) -> str:
    """The names of the two shortest operations of the same thread that contain the event."""
    outer = [
        each
        for each in events
        if each.get("tid") == event.get("tid")
        and each is not event
        and each["ts"] <= event["ts"]
        and event["ts"] + event["dur"] <= each["ts"] + each["dur"]
    ]
    nearest = sorted(outer, key=lambda each: float(each["dur"]))[:2]
    return " in ".join(str(each["name"]) for each in nearest) or event["name"]
