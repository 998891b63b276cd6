"""`scheduler=step`, `multi_step`, `exponential` and `one_cycle`.

Milestones are shares of the run, since its end may be a time.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

from torch.optim import Optimizer

from medconv.training.optim.lr_schedulers import ProgressSchedule, half_cosine

# Progress is a sum over steps, so it may fall short of a milestone by rounding.
_ROUNDING = 1e-9


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
            return 1 + (initial - 1) * half_cosine(progress / pct_start)
        return final + (1 - final) * half_cosine((progress - pct_start) / (1 - pct_start))

    return ProgressSchedule(optimizer, shape, warmup_steps)


def _share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive, got {value}")
