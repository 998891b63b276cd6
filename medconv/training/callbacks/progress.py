"""Progress of a training: a bar in a terminal, lines in a log."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from medconv.targets.monitor import DICE, MonitoredMetric
from medconv.training.callbacks.time_budget import TimeBudget
from medconv.training.checkpoint.writer import CheckpointWriter
from medconv.utils import progress

log = logging.getLogger(__name__)


class ProgressBar(Callback):
    """One bar for the whole run: epoch, steps, time left, loss, samples per second and the best score.

    Args: checkpoints: know the best score. budget: of time; estimates the number of steps. every: seconds
    between updates; to read the loss, each of them waits for the GPU. clock: of seconds. console: a terminal.
    """

    def __init__(
        self,
        checkpoints: CheckpointWriter,
        budget: TimeBudget | None = None,
        every: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self.checkpoints, self.budget, self.every = checkpoints, budget, every
        self._clock, self._settings = clock, {} if console is None else {"console": console}
        self._bar: Progress | None = None  # on rank 0, while it trains or tests
        self._drawn_at = -math.inf

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._due():
            self._draw_training(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if self._due():
            self._draw(description=f"validating {batch_idx + 1}/{sum(trainer.num_val_batches)}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is not None:
            self._draw_training(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, 0)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if self._due():
            total = sum(trainer.num_test_batches)
            self._draw(description="testing", completed=batch_idx + 1, total=total)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _begin(self, trainer: Trainer, completed: int) -> None:
        if not trainer.is_global_zero:
            return
        self._bar = progress.bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            **{"expand": True, "auto_refresh": False, "get_time": self._clock, **self._settings},
            speed_estimate_period=600.0,  # seconds: longer than most validations
        )
        self._bar.add_task("starting", total=None, completed=completed, figures="")
        self._bar.start()

    def _due(self) -> bool:
        return self._bar is not None and self._clock() - self._drawn_at >= self.every

    def _draw_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._bar is not None
        budgeted = self.budget.total_steps if self.budget is not None else None
        steps = min(trainer.estimated_stepping_batches, math.inf if budgeted is None else budgeted)
        total = steps if math.isfinite(steps) else None
        self._bar.update(self._bar.task_ids[0], completed=trainer.global_step, total=total)
        seconds, scores = self._bar.tasks[0].time_remaining, trainer.callback_metrics
        figures = [] if seconds is None else [f"{_duration(seconds)} left"]
        figures += [f"loss {float(scores['train/loss']):.3f}"] if "train/loss" in scores else []
        speed, best = scores.get("perf/samples_per_second"), self.checkpoints.best
        figures += [] if speed is None else [f"{float(speed):.1f} samples/s"]
        if best is not None and math.isfinite(best):
            monitored: MonitoredMetric = getattr(pl_module, "monitored", DICE)
            figures.append(f"best {monitored.words} {best:.3f}")
        self._draw(description=f"epoch {trainer.current_epoch}", figures="  ".join(figures))

    def _draw(self, **fields: Any) -> None:
        assert self._bar is not None
        self._bar.update(self._bar.task_ids[0], **fields)
        self._bar.refresh()
        self._drawn_at = self._clock()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class ProgressLines(Callback):
    """Logs a line every few seconds and one per validation; in a log file a bar would be thousands of lines.

    Args: every: seconds between lines. level: of these; `logging.DEBUG` writes them to `train.log` alone.
    clock: of seconds.
    """

    def __init__(
        self,
        every: float = 20.0,
        level: int = logging.INFO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every, self.level = every, level
        self._clock, self._logged_at, self._samples = clock, clock(), 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += len(batch["image"]) * trainer.world_size
        now = self._clock()
        if now - self._logged_at >= self.every:
            loss = float(trainer.callback_metrics.get("train/loss", math.nan))
            speed = self._samples / (now - self._logged_at)
            position = trainer.current_epoch, trainer.global_step
            log.log(self.level, "epoch %d, step %d: loss %.4f, %.1f samples/s", *position, loss, speed)
            self._logged_at, self._samples = now, 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        monitored: MonitoredMetric = getattr(pl_module, "monitored", DICE)
        if not trainer.sanity_checking and monitored.name in trainer.callback_metrics:
            position = trainer.current_epoch, trainer.global_step
            score = float(trainer.callback_metrics[monitored.name])
            log.info("epoch %d, step %d: validation %s %.4f", *position, monitored.words, score)
        self._logged_at, self._samples = self._clock(), 0


def _duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
