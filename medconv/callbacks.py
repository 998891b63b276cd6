"""What runs beside the training loop: the time budget, the last validation, pictures, the progress bar."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from medconv.goals import DICE, Goal
from medconv.outcome_pictures import pictures
from medconv.outcome_views import Worst, card, said
from medconv.pictures import overlay
from medconv.schedules import ProgressSchedule
from medconv.tasks.whole import arrays

log = logging.getLogger(__name__)


class TimeBudget(Callback):
    """Ends training, its last validation included, after a given time, and fits the schedule to it.

    Rank 0 estimates from the steps and validations so far how many steps fit, and tells the others, again and again
    while the run goes on; all ranks stop at the same step. Estimate and time spent are in the checkpoint.
    Args: seconds: from the start of training.
    """

    _UNSEEN = 3  # first steps, which warm up and say nothing of the rest
    _SLOW = 0.2  # of the time: where the first steps take more, they have to do

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"trainer.max_time must be positive, got {seconds} seconds")
        self.seconds, self.spent = seconds, 0.0
        self._every = min(10.0, seconds / 20)  # seconds between estimates
        self.total_steps: int | None = None
        self._next = self._UNSEEN + 2  # the step of the next estimate
        self._steps: deque[float] = deque(maxlen=100)  # seconds of recent optimizer steps
        self._validation: float | None = None  # seconds a validation takes
        self._begun = self._mark = self._validating = 0.0
        self._seen = 0

    def state_dict(self) -> dict[str, Any]:
        kept = {"total_steps": self.total_steps, "validation": self._validation}
        return {"seconds": self.seconds, "spent": self._elapsed(), **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.spent, self._validation = state["spent"], state["validation"]
        if state.get("seconds", self.seconds) == self.seconds:
            self.total_steps = state["total_steps"]

    def leave_out(self, seconds: float) -> None:
        """Time that has just passed, in which there was no training, does not count."""
        self.spent -= seconds
        self._mark += seconds

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun = self._mark = time.monotonic()
        self._seen = trainer.global_step
        self._next += trainer.global_step
        self._limit = trainer.estimated_stepping_batches
        if self.total_steps is None:  # begun, or made longer or shorter than it was
            for schedule in _schedules(trainer):
                schedule.progress = min(1.0, self.spent / self.seconds)
                schedule.move_end(float(self._limit))  # until there is an estimate; what a checkpoint says is of other times
        owed = getattr(trainer.fit_loop.epoch_loop, "owed", False)
        self._stop_at_the_end(trainer, unless=owed)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = time.monotonic() - self._validating
        if trainer.sanity_checking:
            share = sum(trainer.num_sanity_val_batches) / max(1, sum(trainer.num_val_batches))  # type: ignore[arg-type]
            seconds = seconds / share if share else 0.0
        else:
            self._mark += seconds
            self._stop_at_the_end(trainer)
        self._validation = seconds

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._seen:  # gradients are being accumulated
            return
        now, self._seen = time.monotonic(), trainer.global_step
        self._steps.append(now - self._mark)
        self._mark = now
        if self._seen >= self._next or (self.total_steps is None and self._are_slow(trainer)):
            self._agree(trainer)
        self._stop_at_the_end(trainer)

    def _stop_at_the_end(self, trainer: Trainer, unless: bool = False) -> None:
        """Args: unless: there is a validation to be done first."""
        if self.total_steps is not None and self._seen >= self.total_steps and not unless:
            trainer.should_stop = True

    def _are_slow(self, trainer: Trainer) -> bool:
        """Whether so few steps took so much of the time that the next must not be waited for; by rank 0's clock."""
        return bool(trainer.strategy.broadcast(self._elapsed() > self._SLOW * self.seconds))

    def _agree(self, trainer: Trainer) -> None:
        """Rank 0's estimate, and the step at which to estimate again, become everybody's."""
        recent = list(self._steps)[min(self._UNSEEN, len(self._steps) - 1) if len(self._steps) < 50 else 0 :]
        step = max(1e-6, statistics.fmean(recent))
        estimate = (self._seen + self._fitting(trainer, step), self._seen + max(1, round(self._every / step)))
        total, self._next = trainer.strategy.broadcast(estimate)
        first, self.total_steps = self.total_steps is None, total
        for schedule in _schedules(trainer):
            schedule.move_end(min(float(total), float(self._limit)))
        if first:
            log.info("%d steps fit into the %.0f seconds of trainer.max_time", total, self.seconds)

    def _fitting(self, trainer: Trainer, step: float) -> int:
        """The most further steps that fit, with the validations that fall between and after them."""
        left = self.seconds - self._elapsed()
        between = steps_between_validations(trainer)
        validation = self._validation or 0.0
        done = self._seen % between
        for validations in range(1, 1 + int(math.ceil(left / step) / between) + 2 if left > 0 else 1):
            steps = max(0, int((left - validations * validation) / step))
            if math.ceil((done + steps) / between) <= validations:
                return steps
        return 0

    def _elapsed(self) -> float:
        return self.spent + (time.monotonic() - self._begun if self._begun else 0.0)


def steps_between_validations(trainer: Trainer) -> float:
    """Optimizer steps from one validation to the next, in the mean, by Lightning's two settings for it."""
    batches, within = trainer.num_training_batches, float(trainer.val_check_batch or math.inf)
    epochs = trainer.check_val_every_n_epoch
    if epochs is None:  # then batches are counted across epochs
        return max(1.0, within / trainer.accumulate_grad_batches)
    per_epoch = max(1.0, math.ceil(batches / trainer.accumulate_grad_batches))
    return max(1.0, per_epoch * epochs / max(1, batches // within))


def _schedules(trainer: Trainer) -> list[ProgressSchedule]:
    return [c.scheduler for c in trainer.lr_scheduler_configs if isinstance(c.scheduler, ProgressSchedule)]


class EndWithValidation(Callback):
    """A run's last step is validated, and so saved, wherever in an epoch and between validations it ends.

    Lightning alone ends at `max_steps` in the middle of an epoch with neither.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
        if trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step or (last_epoch and trainer.is_last_batch):
            trainer.should_stop = True
            trainer.check_val_every_n_epoch = 1


class Pictures(Callback):
    """In TensorBoard: the first training samples, as augmented, and image, reference and prediction of validation cases.

    Of whole images all validation cases in one picture, at the end where the network looked in the most wrong ones.
    Args: cases: how many, on rank 0. spacing_mm: of training samples.
    """

    def __init__(self, spacing_mm: Sequence[float], cases: int = 3) -> None:
        self.spacing_mm, self.cases, self._samples = tuple(spacing_mm), cases, 0
        self._worst = Worst(cases)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._samples >= self.cases or trainer.global_step or not trainer.is_global_zero:
            return
        outcome = getattr(pl_module, "outcome", None)
        for image, label, number in zip(batch["image"], batch["label"], map(int, batch["sample"]), strict=True):
            if self._samples >= self.cases:
                return
            self._samples += 1
            array = image[0].float().cpu().numpy()
            if outcome is None:
                picture = overlay(array, [_known(label[0], pl_module)], self.spacing_mm)
                self._show(trainer, f"training/sample {number} (image, label)", picture)
            else:
                picture = overlay(array, [], self.spacing_mm, focus=np.zeros(array.shape, bool))
                self._show(trainer, f"training/sample {number} ({said(outcome, label.tolist())})", picture)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._worst = Worst(self.cases)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        if getattr(pl_module, "outcome", None) is not None:
            self._worst.see(pl_module.outcome, batch, outputs["outputs"])  # type: ignore[arg-type]
            return
        if batch_idx >= self.cases:
            return
        image = batch["image"][0, 0].float().cpu().numpy()
        labels = [_known(label, pl_module) for label in (batch["label"][0, 0], outputs["prediction"])]
        picture = overlay(image, labels, batch["spacing_mm"])
        self._show(trainer, f"validation/{outputs['case']} (image, reference, prediction)", picture)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        outcome, rows = getattr(pl_module, "outcome", None), getattr(pl_module, "rows", {})
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if outcome is None or not rows or trainer.sanity_checking or not (trainer.is_global_zero and loggers):
            return
        for name, picture in pictures(outcome, *arrays(rows)).items():
            self._show(trainer, f"validation/{name}", picture)
        for logger in loggers:
            logger.experiment.add_text("validation/scores", card(outcome, *arrays(rows)), trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """By the weights that answered: averaged ones, which are not there at the end of a validation, stay from here on."""
        if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            for tag, picture in self._worst.pictures(pl_module, self.spacing_mm):
                self._show(trainer, tag, picture)

    @staticmethod
    def _show(trainer: Trainer, tag: str, picture: np.ndarray) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(tag, picture, trainer.global_step, dataformats="HWC")


def _known(label: Tensor, pl_module: LightningModule) -> np.ndarray:
    """A label map whose voxels to ignore are not painted."""
    ignore = getattr(getattr(pl_module, "targets", None), "ignore", None)
    array = label.cpu().numpy().astype(np.int16)
    return array if ignore is None else np.where(array == ignore, 0, array)


class ProgressBar(TQDMProgressBar):
    """Lightning's bar with loss, Dice and speed, without the version number; for terminals."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return {k: v for k, v in super().get_metrics(trainer, pl_module).items() if k != "v_num"}


class ProgressLines(Callback):
    """A line now and then and one per validation; for logs, where a bar would be thousands of lines.

    Args: every: seconds between lines.
    """

    def __init__(self, every: float = 20.0) -> None:
        self.every, self._said, self._samples = every, time.monotonic(), 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += len(batch["image"]) * trainer.world_size
        now = time.monotonic()
        if now - self._said >= self.every:
            loss = float(trainer.callback_metrics.get("train/loss", math.nan))
            speed = self._samples / (now - self._said)
            log.info("epoch %d, step %d: loss %.4f, %.1f samples/s", trainer.current_epoch, trainer.global_step, loss, speed)
            self._said, self._samples = now, 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        goal: Goal = getattr(pl_module, "goal", DICE)
        if not trainer.sanity_checking and goal.name in trainer.callback_metrics:
            score, where = float(trainer.callback_metrics[goal.name]), (trainer.current_epoch, trainer.global_step)
            log.info("epoch %d, step %d: validation %s %.4f", *where, goal.words, score)
        self._said, self._samples = time.monotonic(), 0
