"""A clock that tests move by hand, so that no test depends on the speed of the machine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from lightning import Callback

from medconv.data.augmentation.augment import Augment
from medconv.performance import step_profiler
from medconv.training import trainer
from medconv.training.callbacks.time_budget import TimeBudget


class Clock:
    """Seconds that pass only by `advance`."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


CLOCK = Clock()  # of runs, whose config names the classes below


class Ticks(Callback):
    """Moves the clock.

    Args: step, case: seconds for a training batch, and for a validation case. more: for the first of each.
    """

    def __init__(self, step: float, case: float = 0.0, more: float = 0.0) -> None:
        self.step, self.case = step, case
        self.first_step = self.first_case = more

    def on_train_batch_start(self, *_: Any) -> None:
        CLOCK.advance(self.step + self.first_step)
        self.first_step = 0.0

    def on_validation_batch_start(self, *_: Any) -> None:
        CLOCK.advance(self.case + self.first_case)
        self.first_case = 0.0


class SlowAugment(Augment):
    """A loader that takes 0.3 seconds for a batch."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        CLOCK.advance(0.3)
        return super().__call__(batch)


class _ProfilerClock(step_profiler._Clock):
    now = staticmethod(CLOCK)


def use_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time budget and step profiler of the test's runs read CLOCK, from a number that keeps sums exact."""
    monkeypatch.setattr(CLOCK, "seconds", Clock().seconds)
    monkeypatch.setattr(trainer, "TimeBudget", partial(TimeBudget, clock=CLOCK))
    monkeypatch.setattr(step_profiler, "_Clock", _ProfilerClock)


def ticks(step: float, case: float = 0.0, more: float = 0.0) -> str:
    """The override that adds `Ticks` to a run."""
    return f"+callbacks.ticks={{_target_:helpers.clock.Ticks,step:{step},case:{case},more:{more}}}"
