"""Learning-rate schedules over the progress of a run, 0 to 1, whether its end is a step count or a time.

lr = base lr * warm-up * shape(progress), times a factor for the run's length if the optimizer has one
(`lr_factor`: total steps to factor). Steps are optimizer steps. Milestones are shares of the run, since
its end may be a time.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# Progress is a sum over steps, so it may fall short of a milestone by rounding.
_ROUNDING = 1e-9


class ProgressSchedule(LRScheduler):
    """A schedule whose length can change at any time; progress still ends at 1.

    Args:
        optimizer: whose learning rates are the base.
        shape: progress (0 to 1) to factor.
        warmup_steps: linear from near 0; at most a fifth of the run.
    Attributes:
        total_steps: its length, in optimizer steps.
        needs_validation: whether it follows the scores of validations.
    """

    needs_validation = False

    def __init__(self, optimizer: Optimizer, shape: Callable[[float], float], warmup_steps: int = 0) -> None:
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

    def get_lr(self) -> list[Any]:
        warmup_steps = max(1.0, min(float(self.warmup_steps), self.total_steps / 5))
        # + 1: the first step has a share of the learning rate, not 0
        warmup = min(1.0, (self.last_epoch + 1 - self.warmed_up_from) / warmup_steps)
        factor = warmup * self.shape(min(1.0, self.progress))
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


class PlateauSchedule(ProgressSchedule):
    """Lower after `patience` validations without progress, like torch's ReduceLROnPlateau.

    The same behaviour in torch has a `patience` smaller by one.

    Args:
        optimizer: whose learning rates are the base.
        warmup_steps: as in `ProgressSchedule`.
        monitor: name of the metric.
        mode: `max` if more is better, else `min`.
        patience: number of validations.
        min_delta: more than this beyond the best value is progress.
        factor: multiplies the learning rate.
        min_factor: lower limit, as a share of the base learning rate.
    Raises:
        ValueError: values out of range.
    """

    needs_validation = True

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int = 0,
        monitor: str = "val/dice",
        mode: str = "max",
        patience: int = 5,
        min_delta: float = 0.0,
        factor: float = 0.5,
        min_factor: float = 1e-3,
    ) -> None:
        check_patience(patience, min_delta, mode)
        _share("factor", factor)
        if not 0 <= min_factor <= 1:
            raise ValueError(f"min_factor must be a share of the learning rate, 0 to 1, got {min_factor}")
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.factor = factor
        self.min_factor = min_factor
        self.sign = 1 if mode == "max" else -1
        self.level = 1.0  # of the learning rate, as a share of the base
        self.best = -math.inf  # times sign, so that more is better
        self.waited = 0  # validations since the best one
        super().__init__(optimizer, lambda progress: self.level, warmup_steps)

    def validated(self, value: float) -> None:
        """Count a validation; a new learning rate applies from the next step on. NaN is no progress."""
        signed_value = self.sign * value
        if signed_value > self.best + self.min_delta:
            self.best = signed_value
            self.waited = 0
        else:
            self.waited += 1
        if self.waited >= self.patience:
            self.level = max(self.min_factor, self.level * self.factor)
            self.waited = 0
            self._apply()

    def state_dict(self) -> dict[str, Any]:
        keys = ("level", "best", "waited", "monitor", "sign")
        return {**super().state_dict(), **{key: getattr(self, key) for key in keys}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps no count of another metric; the state may be another schedule's."""
        saved_metric = (state_dict.get("monitor"), state_dict.get("sign"))
        if saved_metric != (self.monitor, self.sign):
            of_metric = ("best", "waited", "monitor", "sign")
            state_dict = {key: value for key, value in state_dict.items() if key not in of_metric}
        super().load_state_dict(state_dict)


def check_patience(patience: int, min_delta: float, mode: str) -> None:
    """Raises: ValueError: values out of range, of a plateau or of early stopping."""
    if type(patience) is not int or patience < 1:
        raise ValueError(f"patience must be a whole number of validations, 1 or more, got {patience}")
    if not 0 <= min_delta < math.inf:
        raise ValueError(f"min_delta must be 0 or more, got {min_delta}")
    if mode not in ("max", "min"):
        raise ValueError(f"mode must be max or min, got {mode}")


def cosine(optimizer: Optimizer, warmup_steps: int = 0) -> ProgressSchedule:
    """One half cosine down to 0. Source: Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts."""
    return ProgressSchedule(optimizer, _cosine, warmup_steps)


def poly(optimizer: Optimizer, warmup_steps: int = 0, power: float = 0.9) -> ProgressSchedule:
    """(1 - progress) ** power, as in nnU-Net. Source: Chen et al. 2018, arXiv:1606.00915."""
    return ProgressSchedule(optimizer, lambda progress: (1 - progress) ** power, warmup_steps)


def constant(optimizer: Optimizer, warmup_steps: int = 0) -> ProgressSchedule:
    """The base learning rate after the warm-up."""
    return ProgressSchedule(optimizer, lambda progress: 1.0, warmup_steps)


def step(
    optimizer: Optimizer, warmup_steps: int = 0, step_fraction: float = 0.3, gamma: float = 0.1
) -> ProgressSchedule:
    """Multiplied by `gamma` at every multiple of `step_fraction`, a share of the run; torch's StepLR."""
    _share("step_fraction", step_fraction)
    _positive("gamma", gamma)

    def shape(progress: float) -> float:
        num_passed = int(progress / step_fraction + _ROUNDING)
        return gamma**num_passed

    return ProgressSchedule(optimizer, shape, warmup_steps)


def multi_step(
    optimizer: Optimizer,
    warmup_steps: int = 0,
    milestones: Sequence[float] = (0.5, 0.75, 0.9),
    gamma: float = 0.1,
) -> ProgressSchedule:
    """Multiplied by `gamma` at each milestone, a share of the run; torch's MultiStepLR."""
    is_list = not isinstance(milestones, (str, int, float))
    if not is_list or list(milestones) != sorted(milestones):
        raise ValueError(f"milestones must be a list of rising shares of the run, got {milestones}")
    for milestone in milestones:
        _share("milestones", milestone)
    _positive("gamma", gamma)
    rising = list(milestones)

    def shape(progress: float) -> float:
        num_passed = bisect_right(rising, progress + _ROUNDING)
        return gamma**num_passed

    return ProgressSchedule(optimizer, shape, warmup_steps)


def exponential(optimizer: Optimizer, warmup_steps: int = 0, final: float = 0.01) -> ProgressSchedule:
    """The same factor each step, down to `final` of the base learning rate at the end; torch's
    ExponentialLR.
    """
    _positive("final", final)
    return ProgressSchedule(optimizer, lambda progress: final**progress, warmup_steps)


def one_cycle(
    optimizer: Optimizer,
    warmup_steps: int = 0,
    pct_start: float = 0.3,
    initial: float = 0.04,
    final: float = 4e-6,
) -> ProgressSchedule:
    """The factor goes from `initial` up to 1 at `pct_start`, then down to `final`, both times by a cosine.

    Like torch's OneCycleLR with `max_lr` as the base learning rate, but momentum stays unchanged.

    Args:
        optimizer: whose learning rates are the base.
        warmup_steps: as in `ProgressSchedule`.
        pct_start: a share of the run, in spite of torch's name.
        initial: factor at the start.
        final: factor at the end.
    Source: Smith & Topin 2018, arXiv:1708.07120.
    """
    _share("pct_start", pct_start)
    _positive("initial", initial)
    _positive("final", final)

    def shape(progress: float) -> float:
        if progress < pct_start:
            return 1 + (initial - 1) * _cosine(progress / pct_start)
        return final + (1 - final) * _cosine((progress - pct_start) / (1 - pct_start))

    return ProgressSchedule(optimizer, shape, warmup_steps)


def _share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive, got {value}")


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))
