"""Validations of a run with `trainer.max_time`: how many batches each takes, and which are postponed."""

import logging
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from lightning import Trainer

log = logging.getLogger(__name__)


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
        self._num_batches: int | None = None  # that fit; None: all
        self._said_postponed = False
        # When a validation began, and when each of its batches ended
        self._batch_times: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "validation": self.seconds_each,
            "val_batches": self._num_batches,
            "validating": self._spent,
            "validated_at": self.last_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seconds_each = state["validation"]
        # Earlier versions have not recorded these
        if not self._validates_all:
            self._num_batches = state.get("val_batches")
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

    def _choose_num_batches(self, trainer: Trainer, batch_seconds: float) -> None:
        """Rank 0's answer counts."""
        # A resumed run validates as many as before, so that its scores can be compared
        if self._validates_all or self._num_batches is not None:
            return
        (all_batches,) = trainer.num_val_batches
        fitting = max(1, int(self._MAX_SHARE_OF_LAST * self._run_seconds / max(batch_seconds, 1e-6)))
        fitting = trainer.strategy.broadcast(fitting)
        if fitting >= all_batches:
            return
        self._num_batches = fitting
        log.warning(
            "a validation of all %d batches would take %.0f of the %.0f s of trainer.max_time, so only the "
            "first %d are validated; set more trainer.max_time, or trainer.limit_val_batches=1.0 for all",
            all_batches,
            batch_seconds * all_batches,
            self._run_seconds,
            fitting,
        )

    def limit_batches(self, trainer: Trainer) -> None:
        """Makes Lightning validate the chosen number of batches."""
        if self._num_batches is None:
            return
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
        interval = steps_between_validations(trainer)
        validation_steps = (self.seconds_each or 0.0) / step_seconds
        least_steps = validation_steps * (1 / self._MAX_SHARE - 1)
        return interval * max(1, math.ceil(least_steps / interval))


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
