"""Schedules of a run of some steps, and their learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from medconv.training.optim.lr_schedulers import ProgressSchedule


def make(
    build: Callable[..., ProgressSchedule], total: float, base: float = 0.1, **arguments
) -> ProgressSchedule:
    schedule = build(torch.optim.SGD([nn.Parameter(torch.zeros(1))], base), **arguments)
    schedule.set_length(total)
    return schedule


def rates(schedule: ProgressSchedule, steps: int) -> list[float]:
    """The learning rate of each of the next optimizer steps."""
    learning_rates = []
    for _ in range(steps):
        learning_rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return learning_rates


def rates_of_torch(build: Callable[..., Any], steps: int, **arguments: Any) -> list[float]:
    """The curve of one of torch's schedulers."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    schedule, learning_rates = build(optimizer, **arguments), []
    for _ in range(steps):
        learning_rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return learning_rates
