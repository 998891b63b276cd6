"""`trainer.max_time`: ends training on time and fits the learning rate schedule to it."""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from lightning import Callback, LightningModule, Trainer

from medconv.training.optim.lr_schedulers import ProgressSchedule

log = logging.getLogger(__name__)


class TimeBudget(Callback):
    """Ends training, last validation included, after a given time, and fits the learning rate schedule to it.

    Rank 0 estimates from the steps and validations so far how many steps fit, and repeats this while the
    run trains. It tells the other ranks, so that all stop at the same step. The checkpoint holds the
    estimate and the time spent.
    Args: seconds: from the start of training. clock: seconds that never run backwards.
    """

    _WARMUP = 3  # first steps, too slow to estimate from
    _SLOW = 0.2  # share of the time; if the first steps take more, the last of them is the estimate

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not seconds > 0:
            raise ValueError(f"trainer.max_time must be positive, got {seconds} seconds")
        self.seconds, self.spent, self._clock = seconds, 0.0, clock
        self._every = min(10.0, seconds / 20)  # seconds between estimates
        self.total_steps: int | None = None
        self._next = self._WARMUP + 2  # the step of the next estimate
        self._steps: deque[float] = deque(maxlen=100)  # seconds of recent optimizer steps
        self._validation: float | None = None  # seconds a validation takes
        self._cases: list[float] = []  # when a validation began, and its cases ended
        self._begun = self._mark = 0.0
        self._limit = math.inf  # steps by the config
        self._earlier: dict[str, Any] = {}  # time and steps of the run to resume
        self._seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "spent": self._elapsed(),
            "validation": self._validation,
            "limit": self._limit,
            "total_steps": self.total_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.spent, self._validation = state["spent"], state["validation"]
        self.total_steps = state["total_steps"]
        self._earlier = {key: state[key] for key in ("seconds", "limit") if key in state}

    def exclude(self, seconds: float) -> None:
        """Time that has just passed does not count against the budget."""
        self.spent -= seconds
        self._mark += seconds

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun = self._mark = self._clock()
        self._seen = trainer.global_step
        self._next += trainer.global_step
        self._limit = float(trainer.estimated_stepping_batches)
        if not self._earlier.items() <= {"seconds": self.seconds, "limit": self._limit}.items():
            self.total_steps = None  # what fitted into another budget
            progress = max(self.spent / self.seconds, trainer.global_step / self._limit)
            for schedule in _schedules(trainer):
                schedule.move_end(self._limit, progress=min(1.0, progress))
        if not getattr(trainer.fit_loop.epoch_loop, "owed", False):  # else a validation comes first
            self._stop_at_the_end(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._cases = [self._clock()]

    def on_validation_batch_end(self, *_: Any) -> None:
        self._cases.append(self._clock())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = self._clock() - self._cases[0]
        if trainer.sanity_checking:
            cases = [end - begin for begin, end in pairwise(self._cases)]
            # the first case starts workers and may compile, so it says little about the others
            seconds = statistics.fmean(cases[1:] or cases or [0.0]) * sum(trainer.num_val_batches)
        else:
            self._mark += seconds
            self._stop_at_the_end(trainer)
        self._validation = seconds

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._seen:  # gradients are being accumulated
            return
        now, self._seen = self._clock(), trainer.global_step
        self._steps.append(now - self._mark)
        self._mark = now
        if self._seen >= self._next or (self.total_steps is None and self._are_slow(trainer)):
            self._agree(trainer)
        self._stop_at_the_end(trainer)

    def _stop_at_the_end(self, trainer: Trainer) -> None:
        if self.total_steps is not None and self._seen >= self.total_steps:
            trainer.should_stop = True

    def _are_slow(self, trainer: Trainer) -> bool:
        """Whether the first steps took so long that an estimate is due now; by rank 0's clock.

        The very first, which may compile the network, says nothing about the others.
        """
        share = self._SLOW if len(self._steps) > 1 else 1.0
        slow = self._clock() - self._begun > share * (self.seconds - self.spent)
        return bool(trainer.strategy.broadcast(slow))

    def _agree(self, trainer: Trainer) -> None:
        """All ranks take rank 0's estimate, and the step at which to estimate again."""
        recent = list(self._steps)[min(self._WARMUP, len(self._steps) - 1) if len(self._steps) < 50 else 0 :]
        step = max(1e-6, statistics.fmean(recent))
        estimate = (self._seen + self._fitting(trainer, step), self._seen + max(1, round(self._every / step)))
        total, self._next = trainer.strategy.broadcast(estimate)
        total = max(total, self._least(trainer))
        first, self.total_steps = self.total_steps is None, total
        for schedule in _schedules(trainer):
            schedule.move_end(min(float(total), self._limit))
        if first and total < self._limit:
            text = "at the speed of the first steps, about %d steps fit into trainer.max_time=%.0f s%s"
            growing = getattr(trainer.lightning_module, "growing_patch", None) is not None
            log.info(text, total, self.seconds, ", and fewer as patches grow" if growing else "")

    def _fitting(self, trainer: Trainer, step: float) -> int:
        """How many more steps fit, with the validations between and after them. Args: step: its seconds."""
        left = self.seconds - self._elapsed()
        between = steps_between_validations(trainer)
        validation = self._validation or 0.0
        done = self._seen % between
        if left <= 0:
            return 0
        validations = max(1, math.ceil((done + left / step) / (between + validation / step)))
        one_less = int((validations - 1) * between - done)  # ends with it, and fits in any case
        return max(0, one_less, int((left - validations * validation) / step))

    @staticmethod
    def _least(trainer: Trainer) -> int:
        """Steps that Lightning takes in any case."""
        per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        return max(trainer.min_steps or 0, (trainer.min_epochs or 0) * per_epoch)

    def _elapsed(self) -> float:
        return self.spent + (self._clock() - self._begun if self._begun else 0.0)


def steps_between_validations(trainer: Trainer) -> float:
    """Mean number of optimizer steps from one validation to the next, from Lightning's two settings."""
    batches, within = trainer.num_training_batches, float(trainer.val_check_batch or math.inf)
    epochs = trainer.check_val_every_n_epoch
    if epochs is None:  # batches are counted across epochs
        return max(1.0, within / trainer.accumulate_grad_batches)
    per_epoch = max(1.0, math.ceil(batches / trainer.accumulate_grad_batches))
    return max(1.0, per_epoch * epochs / max(1, batches // within))


def _schedules(trainer: Trainer) -> list[ProgressSchedule]:
    return [c.scheduler for c in trainer.lr_scheduler_configs if isinstance(c.scheduler, ProgressSchedule)]
