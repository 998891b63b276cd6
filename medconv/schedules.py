"""Learning-rate schedules over the progress of a run, 0 to 1, whether its end is a step count or a time.

lr = base lr * warm-up * shape(progress). Steps are optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class ProgressSchedule(LRScheduler):
    """A schedule whose end may move: `total_steps` may be set anew at any time, and progress still ends at 1.

    Args: shape: progress (0 to 1) to factor. warmup_steps: linear from near 0; at most a fifth of the run.
    """

    def __init__(self, optimizer: Optimizer, shape: Callable[[float], float], warmup_steps: int = 0) -> None:
        self.shape, self.warmup_steps = shape, warmup_steps
        self.total_steps: float = math.inf
        self.progress = 0.0
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch >= 0:
            self.progress += (1 - self.progress) / max(1.0, self.total_steps - self.last_epoch)
        super().step()

    def get_lr(self) -> list[Any]:
        warmup = max(1.0, min(float(self.warmup_steps), self.total_steps / 5))
        factor = min(1.0, (self.last_epoch + 1) / warmup) * self.shape(min(1.0, self.progress))
        return [lr * factor for lr in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        keys = ("total_steps", "progress", "last_epoch", "base_lrs", "_last_lr", "_step_count")
        return {key: getattr(self, key) for key in keys}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The place of a run that goes on; what its config says now, learning rate and length, stays."""
        rates, steps = self.base_lrs, self.total_steps
        super().load_state_dict(state_dict)
        self.base_lrs = rates
        if math.isfinite(steps) and steps != state_dict["total_steps"]:
            self.total_steps = steps
            self.progress = min(1.0, self.last_epoch / steps)
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def cosine(optimizer: Optimizer, warmup_steps: int = 0) -> ProgressSchedule:
    """One half cosine down to 0. Source: Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts."""
    return ProgressSchedule(optimizer, _cosine, warmup_steps)


def poly(optimizer: Optimizer, warmup_steps: int = 0, power: float = 0.9) -> ProgressSchedule:
    """(1 - progress) ** power, as nnU-Net has it. Source: Chen et al. 2018, arXiv:1606.00915."""
    return ProgressSchedule(optimizer, lambda progress: (1 - progress) ** power, warmup_steps)


def constant(optimizer: Optimizer, warmup_steps: int = 0) -> ProgressSchedule:
    """The base learning rate after the warm-up."""
    return ProgressSchedule(optimizer, lambda progress: 1.0, warmup_steps)


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
