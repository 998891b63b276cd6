"""Learning-rate schedules over the progress of a run, 0 to 1, whether its end is a step count or a time.

lr = base lr * warm-up * shape(progress), times a factor for the run's length if the optimizer has one
(`lr_factor`: total steps to factor). Steps are optimizer steps.
"""

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from medconv.utils.errors import ArgumentError


class ProgressSchedule(LRScheduler):
    """A schedule whose length can change at any time; progress still ends at 1.

    Args:
        optimizer: whose learning rates are the base.
        shape: progress (0 to 1) to factor.
        warmup_steps: linear from near 0; at most a fifth of the run.
    Attributes:
        total_steps: its length, in optimizer steps.
        needs_validation: whether it follows the scores of validations; it then has `monitor`, a name of them,
            and `validated(value)`, and `forget_scores()`, where it goes on in another run.
    """

    needs_validation = False

    def __init__(self, optimizer: Optimizer, shape: Callable[[float], float], warmup_steps: int = 0) -> None:
        if warmup_steps < 0:
            raise ArgumentError("warmup_steps", f" must be 0 or more, got {warmup_steps}")
        self.shape = shape
        self.warmup_steps = warmup_steps
        self.progress = 0.0
        self.warmed_up_from = 0  # the step at which the last warm-up began
        self.total_steps = math.inf
        self.configured = math.inf  # total steps by the config
        super().__init__(optimizer)

    def set_length(self, total_steps: float) -> None:
        """Args: total_steps: of the run by its config; infinite: a time ends it."""
        self.total_steps = total_steps
        self.configured = total_steps
        self._apply()

    def move_end(self, total_steps: float, progress: float | None = None) -> None:
        """Take another length than the config's, as a time budget does. Args: progress: None: as it is."""
        self.total_steps = total_steps
        if progress is not None:
            self.progress = progress
        self._apply()

    def forget_scores(self) -> None:
        """The next validation is the first one; the learning rate stays."""

    def warm_up_again(self) -> None:
        """Begin another warm-up at the present step, as for parameters that train from now on."""
        self.warmed_up_from = self.last_epoch
        self._apply()

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch >= 0:
            # An equal share of what is left, so that progress ends at 1 wherever the end has moved
            steps_left = max(1.0, self.total_steps - self.last_epoch)
            self.progress += (1 - self.progress) / steps_left
        super().step()

    def warmup(self) -> float:
        """The factor of the warm-up, above 0 to 1, at the present step."""
        warmup_steps = max(1.0, min(float(self.warmup_steps), self.total_steps / 5))
        # + 1: the first step has a share of the learning rate, not 0
        return min(1.0, (self.last_epoch + 1 - self.warmed_up_from) / warmup_steps)

    def get_lr(self) -> list[Any]:
        factor = self.warmup() * self.shape(min(1.0, self.progress))
        factor_for_length = getattr(self.optimizer, "lr_factor", None)
        if factor_for_length is not None:
            factor *= factor_for_length(self.total_steps)
        return [lr * factor for lr in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        of_this_schedule = ("total_steps", "configured", "progress", "warmed_up_from")
        of_every_schedule = ("last_epoch", "base_lrs", "_last_lr", "_step_count")
        return {key: getattr(self, key) for key in (*of_this_schedule, *of_every_schedule)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the progress of a resumed run; learning rate and length come from the current config."""
        base_lrs = self.base_lrs
        configured = self.configured
        super().load_state_dict(state_dict)
        self.base_lrs = base_lrs
        self.configured = configured
        # Another length, or another schedule, whose state has none; of an infinite length progress is 0
        if configured != state_dict.get("configured"):
            self.total_steps = configured
            self.progress = min(1.0, self.last_epoch / configured)
        self._apply()

    def _apply(self) -> None:
        """Give the optimizer the learning rates of the present progress."""
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def cosine(optimizer: Optimizer, warmup_steps: int = 0) -> ProgressSchedule:
    """One half cosine down to 0. Source: Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts."""
    return ProgressSchedule(optimizer, half_cosine, warmup_steps)


def poly(optimizer: Optimizer, warmup_steps: int = 0, power: float = 0.9) -> ProgressSchedule:
    """(1 - progress) ** power, as in nnU-Net. Source: Chen et al. 2018, arXiv:1606.00915."""
    if power < 0:
        raise ArgumentError("power", f" must be 0 or more, got {power}")
    return ProgressSchedule(optimizer, lambda progress: (1 - progress) ** power, warmup_steps)


def constant(optimizer: Optimizer, warmup_steps: int = 0) -> ProgressSchedule:
    """The base learning rate after the warm-up."""
    return ProgressSchedule(optimizer, lambda progress: 1.0, warmup_steps)


def half_cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
