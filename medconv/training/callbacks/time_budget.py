"""`trainer.max_time`: ends training on time and fits the learning rate schedule to it."""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lightning import Callback, LightningModule, Trainer

from medconv.planning.sizes import SIZES, Size
from medconv.training.callbacks.validation_budget import ValidationBudget
from medconv.training.optim.lr_schedulers import ProgressSchedule

log = logging.getLogger(__name__)


class TimeBudget(Callback):
    """Ends training, all validations included, after a given time, and fits the learning rate schedule to it.

    Rank 0 estimates from the steps and validations so far how many steps fit, and repeats this while the
    run trains. It tells the other ranks, so that all stop at the same step. The checkpoint holds the
    estimate and the time spent. `ValidationBudget` keeps validations short.

    Args:
        seconds: of training, and of the cases that are validated before it.
        size: of the run's plan; a warning says if too few steps fit for it. None: no plan.
        validates_all: every validation takes all batches, however long.
        clock: seconds that never run backwards.
    Attributes:
        total_steps: how many steps fit; None: not yet estimated.
        spent: seconds that earlier starts of the run have trained, and of the validation before training.
    Raises:
        ValueError: `seconds` is not positive.
    """

    _WARMUP = 3  # first steps, too slow to estimate from
    # Share of the time; if the first steps take more, the last of them is the estimate
    _SLOW = 0.2
    _FEW = 50  # below so many steps, the first ones are left out of the mean
    _OVERRUN = 0.1  # share of the time from which an overrun is worth a warning
    # With fewer, no network learns much: 5 steps on left atria end at Dice 0, 246 at 0.55
    # (docs/benchmarks.md)
    _FEWEST_STEPS = 100

    def __init__(
        self,
        seconds: float,
        size: Size | None = None,
        clock: Callable[[], float] = time.monotonic,
        validates_all: bool = False,
    ) -> None:
        if not seconds > 0:
            raise ValueError(f"seconds must be positive, got {seconds}")
        self.seconds = seconds
        self._size = size
        self._validations = ValidationBudget(seconds, validates_all, clock)
        self.spent = 0.0
        self.total_steps: int | None = None
        self._clock = clock
        self._every = min(10.0, seconds / 20)  # seconds between estimates
        self._next_estimate = self._WARMUP + 2  # step
        # Of recent optimizer steps
        self._step_seconds: deque[float] = deque(maxlen=100)
        self._began_at = 0.0
        self._step_began_at = 0.0
        self._max_steps = math.inf  # by the config
        # Time and steps of the run to resume
        self._earlier: dict[str, Any] = {}
        self._last_step = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "spent": self._elapsed(),
            **self._validations.state_dict(),
            "limit": self._max_steps,
            "total_steps": self.total_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.spent = state["spent"]
        self._validations.load_state_dict(state)
        self.total_steps = state["total_steps"]
        self._earlier = {key: state[key] for key in ("seconds", "limit") if key in state}

    def exclude(self, seconds: float) -> None:
        """Time that has just passed does not count against the budget."""
        self.spent -= seconds
        self._step_began_at += seconds

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began_at = self._clock()
        self._step_began_at = self._began_at
        self._last_step = trainer.global_step
        self._next_estimate += trainer.global_step
        self._max_steps = float(trainer.estimated_stepping_batches)
        budget = {"seconds": self.seconds, "limit": self._max_steps}
        if not self._earlier.items() <= budget.items():
            self._begin_other_budget(trainer)
        self._validations.limit_batches(trainer)
        validates_first = getattr(trainer.fit_loop.epoch_loop, "owed", False)
        if not validates_first:
            self._stop_at_the_end(trainer)

    def _begin_other_budget(self, trainer: Trainer) -> None:
        """The resumed run had another time or number of steps, so its estimate says nothing."""
        self.total_steps = None
        progress = max(self.spent / self.seconds, trainer.global_step / self._max_steps)
        for schedule in _schedules(trainer):
            schedule.move_end(self._max_steps, progress=min(1.0, progress))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validations.begin()

    def on_validation_batch_end(self, *_: Any) -> None:
        self._validations.end_batch()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            self.spent += self._validations.end_trial(trainer)
            return
        self._step_began_at += self._validations.end(trainer.global_step)
        self._stop_at_the_end(trainer)

    def postpones_validation(self, trainer: Trainer) -> bool:
        """Whether a validation that is due would take too large a share of the time; never the last one."""
        return not trainer.should_stop and self._validations.postpones(self._elapsed())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Without a new step, gradients are being accumulated
        if trainer.global_step == self._last_step:
            return
        now = self._clock()
        self._last_step = trainer.global_step
        self._step_seconds.append(now - self._step_began_at)
        self._step_began_at = now
        is_due = self._last_step >= self._next_estimate
        if is_due or (self.total_steps is None and self._are_slow(trainer)):
            self._agree(trainer)
        self._stop_at_the_end(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        elapsed = self._elapsed()
        if elapsed > (1 + self._OVERRUN) * self.seconds:
            log.warning(
                "training took %.0f s, trainer.max_time is %.0f s; the last validation took %.0f s, and "
                "trainer.limit_val_batches=N validates fewer cases",
                elapsed,
                self.seconds,
                self._validations.seconds_each or 0.0,
            )

    def _stop_at_the_end(self, trainer: Trainer) -> None:
        if self.total_steps is not None and self._last_step >= self.total_steps:
            trainer.should_stop = True

    def _are_slow(self, trainer: Trainer) -> bool:
        """Whether the first steps took so long that an estimate is due now; by rank 0's clock.

        The very first, which may compile the network, says nothing about the others.
        """
        share = self._SLOW if len(self._step_seconds) > 1 else 1.0
        slow = self._clock() - self._began_at > share * (self.seconds - self.spent)
        return bool(trainer.strategy.broadcast(slow))

    def _agree(self, trainer: Trainer) -> None:
        """All ranks take rank 0's estimate, and the step at which to estimate again."""
        step_seconds = self._mean_step_seconds()
        estimate = self._last_step + self._fitting(trainer, step_seconds)
        next_estimate = self._last_step + max(1, round(self._every / step_seconds))
        estimate, self._next_estimate = trainer.strategy.broadcast((estimate, next_estimate))
        total_steps = max(estimate, self._min_steps(trainer))
        is_first_estimate = self.total_steps is None
        self.total_steps = total_steps
        for schedule in _schedules(trainer):
            schedule.move_end(min(float(total_steps), self._max_steps))
        if is_first_estimate and total_steps < self._max_steps:
            grows = getattr(trainer.lightning_module, "growing_patch", None) is not None
            log.info(
                "at the speed of the first steps, about %d steps fit into %.0f s%s",
                total_steps,
                self.seconds,
                ", and fewer as patches grow" if grows else "",
            )
            self._warn_of_few(total_steps)

    def _warn_of_few(self, steps: int) -> None:
        """The plan took the fastest of a few steps, maybe on an idle machine, or its size is the user's."""
        if self._size is None:
            return
        needed = max(self._FEWEST_STEPS, self._size.enough_steps // 2)
        if steps < needed:
            is_smallest = self._size.name == list(SIZES)[-1]
            log.warning(
                "%d steps are few for plan.size=%s, which needs %d or more: set more trainer.max_time%s or a "
                "coarser data.spacing_mm, or end other work on this machine",
                steps,
                self._size.name,
                needed,
                "" if is_smallest else ", a smaller plan.size",
            )

    def _mean_step_seconds(self) -> float:
        steps = list(self._step_seconds)
        if len(steps) < self._FEW:
            skipped = min(self._WARMUP, len(steps) - 1)
            steps = steps[skipped:]
        return max(1e-6, statistics.fmean(steps))

    def _fitting(self, trainer: Trainer, step_seconds: float) -> int:
        """How many more steps fit, with the validations between and after them."""
        seconds_left = self.seconds - self._elapsed()
        if seconds_left <= 0:
            return 0
        validation = self._validations.seconds_each or 0.0
        interval = self._validations.steps_between(trainer, step_seconds)
        since_validation = min(self._last_step - self._validations.last_step, interval)
        # Time in units of a step: an interval is its steps and one validation
        time_left = since_validation + seconds_left / step_seconds
        time_of_interval = interval + validation / step_seconds
        validations = max(1, math.ceil(time_left / time_of_interval))
        steps = int((seconds_left - validations * validation) / step_seconds)
        # Up to the validation before the last one, which fits in any case
        steps_with_one_less = int((validations - 1) * interval - since_validation)
        return max(0, steps_with_one_less, steps)

    @staticmethod
    def _min_steps(trainer: Trainer) -> int:
        """Steps that Lightning takes in any case."""
        steps_per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        return max(trainer.min_steps or 0, (trainer.min_epochs or 0) * steps_per_epoch)

    def _elapsed(self) -> float:
        """Seconds of training, those of earlier starts of the run included."""
        if not self._began_at:
            return self.spent
        return self.spent + (self._clock() - self._began_at)


def _schedules(trainer: Trainer) -> list[ProgressSchedule]:
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    return [schedule for schedule in schedules if isinstance(schedule, ProgressSchedule)]
