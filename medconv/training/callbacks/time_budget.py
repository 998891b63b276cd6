"""`trainer.max_time`: ends training on time and fits the learning rate schedule to it."""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from lightning import Callback, LightningModule, Trainer

from medconv.planning.limits import ENOUGH_STEPS, ENOUGH_VIEWS, SIZES, Size
from medconv.training.growing_patch import GrowingPatch
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
        views: how often each case is seen in so many steps, to say when it is more than enough.
        clock: seconds that never run backwards.
    Attributes:
        total_steps: how many steps fit at the present speed, by which the schedule ends; None: not yet
            estimated.
        expected_steps: how many the run will make, which are fewer where patches grow.
        spent: seconds that earlier starts of the run have trained, and of the validation before training.
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
        views: Callable[[int], float] | None = None,
    ) -> None:
        self.seconds = seconds
        self._views = views
        self._size = size
        self._validations = ValidationBudget(seconds, validates_all, clock)
        self.spent = 0.0
        self.total_steps: int | None = None
        self.expected_steps: int | None = None
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
            "expected_steps": self.expected_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.spent = state["spent"]
        self._validations.load_state_dict(state)
        self.total_steps = state["total_steps"]
        self.expected_steps = state.get("expected_steps")
        self._earlier = {key: state[key] for key in ("seconds", "limit") if key in state}

    def seconds_left(self) -> float:
        """Until the end of the run."""
        return max(0.0, self.seconds - self._elapsed())

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
        self.expected_steps = None
        if self._earlier.get("seconds") != self.seconds:
            self._validations.begin_other_time(trainer)
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
            self._agree(trainer, batch)
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

    def _agree(self, trainer: Trainer, batch: Any) -> None:
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
        growing = getattr(trainer.lightning_module, "growing_patch", None)
        self.expected_steps = total_steps
        if growing is not None:
            self.expected_steps = self._expected(growing, batch["image"].shape[2:], _schedules(trainer)[0])
        if is_first_estimate and self.expected_steps < self._max_steps:
            log.info(
                "at the speed of the first steps, about %d steps fit into %.0f s%s%s",
                self.expected_steps,
                self.seconds,
                "" if growing is None else ", as patches grow",
                f"; trainer.max_time ends the run before its {self._max_steps:.0f} steps, "
                "trainer.max_time=null does not"
                if math.isfinite(self._max_steps)
                else "",
            )
            self._warn_of_few(self.expected_steps)
            self._say_if_many(self.expected_steps)

    def _expected(self, growing: GrowingPatch, patch: Sequence[int], schedule: ProgressSchedule) -> int:
        """How many steps the run will make if their time is that of the present patch until it grows.

        Its schedule moves its end with the speed, so that its progress is the share of the time.
        """
        assert self.total_steps is not None
        (cost, *_) = growing.costs(patch, schedule.progress, schedule.progress)
        mean_speed = (1 / growing.costs(patch, schedule.progress)).mean()
        return self._last_step + round(float((self.total_steps - self._last_step) * cost * mean_speed))

    def _warn_of_few(self, steps: int) -> None:
        """The plan took the fastest of a few steps, maybe on an idle machine, or its size is the user's."""
        if self._size is None:
            return
        needed = max(self._FEWEST_STEPS, self._size.enough_steps // 2)
        if steps < needed:
            is_smallest = self._size.name == list(SIZES)[-1]
            log.warning(
                "only %d steps, plan.size=%s needs %d or more: raise trainer.max_time, stop other jobs on "
                "this machine, or set %sa coarser data.spacing_mm",
                steps,
                self._size.name,
                needed,
                "" if is_smallest else "a smaller plan.size or ",
            )

    def _say_if_many(self, steps: int) -> None:
        views = self._views(steps) if self._views and steps >= 2 * ENOUGH_STEPS else 0
        if views >= 2 * ENOUGH_VIEWS:
            log.info(
                "each case will be seen %.0f times; beyond some %d times one network hardly gains: medconv "
                "ensemble --members auto shares trainer.max_time among several, which predict as one",
                views,
                ENOUGH_VIEWS,
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


class ValidationBudget:
    """Validations but the last one are postponed until all of them take at most 15 % of the time so far.

    If a validation of all batches would take more than 40 % of the run's time, by the batches before
    training, all validations take only the first ones.

    Args:
        seconds: of the run.
        validates_all: all batches in any case.
        clock: seconds that never run backwards.
    Attributes:
        seconds_each: what a validation takes; None: not yet known.
        last_step: of the last validation.
    """

    # They took 24 % of a run on volumes of 190 x 142 x 88 voxels
    _MAX_SHARE = 0.15
    _MAX_SHARE_OF_LAST = 0.4

    def __init__(
        self, seconds: float, validates_all: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds_each: float | None = None
        self.last_step = 0
        self._run_seconds = seconds
        self._validates_all = validates_all
        self._clock = clock
        self._spent = 0.0  # seconds of all validations so far
        self._num_batches: int | None = None  # that fit, of each rank; None: all
        self._num_of_all: int | None = None  # of all ranks; None: as many as now
        self._said_postponed = False
        # When a validation began, and when each of its batches ended
        self._batch_times: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "validation": self.seconds_each,
            "val_batches": self._num_batches,
            "val_batches_of_all": self._num_of_all,
            "validating": self._spent,
            "validated_at": self.last_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seconds_each = state["validation"]
        # Earlier versions have not recorded these
        if not self._validates_all:
            self._num_batches = state.get("val_batches")
            self._num_of_all = state.get("val_batches_of_all")
        self._spent = state.get("validating", 0.0)
        self.last_step = state.get("validated_at", 0)

    def begin(self) -> None:
        self._batch_times = [self._clock()]

    def end_batch(self) -> None:
        self._batch_times.append(self._clock())

    def end_trial(self, trainer: Trainer) -> float:
        """After the batches that are validated before training: their seconds, as far as they count."""
        batches = [end - begin for begin, end in pairwise(self._batch_times)]
        # The first one starts workers and may compile, so it says little about the others
        representative = batches[1:] or batches or [0.0]
        batch_seconds = statistics.fmean(representative)
        self._choose_num_batches(trainer, batch_seconds)
        self.limit_batches(trainer)
        self.seconds_each = batch_seconds * sum(trainer.num_val_batches)
        # A run that has hardly time for it must train nevertheless
        return min(self._clock() - self._batch_times[0], self._MAX_SHARE_OF_LAST * self._run_seconds)

    def end(self, step: int) -> float:
        """The seconds that the validation after this step took."""
        seconds = self._clock() - self._batch_times[0]
        self.seconds_each = seconds
        self._spent += seconds
        self.last_step = step
        return seconds

    def begin_other_time(self, trainer: Trainer) -> None:
        """A resumed run that is longer may validate more batches, up to all that there are."""
        if self._num_batches is None or self.seconds_each is None:
            return
        batch_seconds = self.seconds_each / self._num_batches
        ranks = _sharing_ranks(trainer)
        before = math.ceil((self._num_of_all or self._num_batches * ranks) / ranks)
        all_batches = sum(trainer.num_val_batches)  # none where no validation is due in this epoch
        fitting = int(min(self._fitting(batch_seconds), all_batches))
        if fitting > before:
            self.seconds_each = batch_seconds * fitting
            self._num_batches = fitting if fitting < all_batches else None
            self._num_of_all = None

    def _choose_num_batches(self, trainer: Trainer, batch_seconds: float) -> None:
        """Rank 0's answer counts. A resumed run keeps its number, so that its scores can be compared."""
        if self._validates_all or self._num_batches is not None:
            return
        (all_batches,) = trainer.num_val_batches
        fitting = trainer.strategy.broadcast(self._fitting(batch_seconds))
        if fitting >= all_batches:
            return
        self._num_batches = fitting
        log.warning(
            "a validation of all %d batches would take %.0f of the %.0f s of trainer.max_time, so only the "
            "first %d are validated; for all, raise trainer.max_time, or set trainer.limit_val_batches=1.0",
            all_batches,
            batch_seconds * all_batches,
            self._run_seconds,
            fitting,
        )

    def _fitting(self, batch_seconds: float) -> int:
        """How many batches the last validation may take; at least one."""
        return max(1, int(self._MAX_SHARE_OF_LAST * self._run_seconds / max(batch_seconds, 1e-6)))

    def limit_batches(self, trainer: Trainer) -> None:
        """Makes Lightning validate the chosen number of batches; on other ranks the same ones."""
        if self._num_batches is None:
            return
        ranks = _sharing_ranks(trainer)
        if self._num_of_all is None:
            self._num_of_all = self._num_batches * ranks
        self._num_batches = math.ceil(self._num_of_all / ranks)
        # Lightning's loop reads it when it makes its loader, which may have been before
        trainer.limit_val_batches = self._num_batches
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop._max_batches = [self._num_batches for _ in loop._max_batches]

    def postpones(self, elapsed: float) -> bool:
        """Whether a validation that is due would take too large a share of the time.

        Args:
            elapsed: seconds that the run has trained so far.
        """
        if self.seconds_each is None:
            return False
        spent = self._spent + self.seconds_each
        if spent <= self._MAX_SHARE * (elapsed + self.seconds_each):
            return False
        if not self._said_postponed:
            self._said_postponed = True
            self._say_postponed(self.seconds_each)
        return True

    def _say_postponed(self, seconds_each: float) -> None:
        log.info(
            "a validation takes %.0f s; validations are postponed while they would take more than %.0f %% of "
            "the time",
            seconds_each,
            100 * self._MAX_SHARE,
        )
        if seconds_each > self._MAX_SHARE_OF_LAST * self._run_seconds:
            log.warning(
                "the last validation takes %.0f of the %.0f s of trainer.max_time; "
                "trainer.limit_val_batches=N validates fewer cases",
                seconds_each,
                self._run_seconds,
            )

    def steps_between(self, trainer: Trainer, step_seconds: float) -> float:
        """Mean number of steps from one validation to the next, with those postponed."""
        by_time = getattr(trainer, "_val_check_time_interval", None)  # `val_check_interval` as a time
        interval = max(1.0, by_time / step_seconds) if by_time else steps_between_validations(trainer)
        validation_steps = (self.seconds_each or 0.0) / step_seconds
        least_steps = validation_steps * (1 / self._MAX_SHARE - 1)
        return interval * max(1, math.ceil(least_steps / interval))


def _sharing_ranks(trainer: Trainer) -> int:
    """How many processes share the batches of a validation; each has its part of a batch of whole images."""
    # The global batch stays, and so does that of a validation in batches
    in_batches = getattr(getattr(trainer, "datamodule", None), "validates_batches", False)
    return 1 if in_batches else trainer.world_size


def steps_between_validations(trainer: Trainer) -> float:
    """Mean number of optimizer steps from one validation to the next, from Lightning's two settings."""
    batches_between = float(trainer.val_check_batch or math.inf)
    epochs = trainer.check_val_every_n_epoch
    if epochs is None:  # batches are counted across epochs
        return max(1.0, batches_between / trainer.accumulate_grad_batches)
    batches = trainer.num_training_batches
    steps_per_epoch = max(1.0, math.ceil(batches / trainer.accumulate_grad_batches))
    validations_per_epoch = max(1, batches // batches_between)
    return max(1.0, steps_per_epoch * epochs / validations_per_epoch)
