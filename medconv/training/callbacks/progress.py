"""Progress of a training: a bar in a terminal, lines in a log, and curves of learning rate and patch size."""

import logging
import math
import time
from collections.abc import Callable
from math import prod
from typing import Any

from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from medconv.targets.scores import DICE, MonitoredMetric
from medconv.training.callbacks.time_budget import TimeBudget
from medconv.training.checkpoint.resumable_loop import ends_now
from medconv.training.checkpoint.writer import CheckpointWriter
from medconv.utils import progress

log = logging.getLogger(__name__)


class ProgressBar(Callback):
    """One bar for the whole run: epoch, steps, time left, loss, samples per second and the best score.

    Args:
        checkpoints: know the best score.
        budget: of time; knows what is left, and how many steps that makes.
        every: seconds between updates; to read the loss, each of them waits for the GPU.
        clock: of seconds.
        console: a terminal.
    """

    def __init__(
        self,
        checkpoints: CheckpointWriter,
        budget: TimeBudget | None = None,
        every: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self.checkpoints = checkpoints
        self.budget = budget
        self.every = every
        self._clock = clock
        self._settings: dict[str, Any] = {} if console is None else {"console": console}
        # There is one on rank 0, while it trains or tests
        self._bar: Progress | None = None
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
            expand=True,
            auto_refresh=False,
            get_time=self._clock,
            # Seconds: longer than most validations, so that these do not empty the estimate
            speed_estimate_period=600.0,
            **self._settings,
        )
        self._bar.add_task("starting", total=None, completed=completed, figures="")
        self._bar.start()

    def _due(self) -> bool:
        return self._bar is not None and self._clock() - self._drawn_at >= self.every

    def _draw_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._bar is not None
        self._bar.update(
            self._bar.task_ids[0], completed=trainer.global_step, total=_total_steps(trainer, self.budget)
        )
        self._draw(
            description=f"epoch {trainer.current_epoch}", figures="  ".join(self._figures(trainer, pl_module))
        )

    def _figures(self, trainer: Trainer, pl_module: LightningModule) -> list[str]:
        """Time left, loss, speed and best score, as far as they are known."""
        assert self._bar is not None
        metrics = trainer.callback_metrics
        figures = []
        by_steps = self._bar.tasks[0].time_remaining
        seconds = by_steps
        if self.budget is not None:
            seconds = self.budget.seconds_left()
            if by_steps is not None and _ends_by_steps(trainer, self.budget):
                seconds = min(seconds, by_steps)
        if seconds is not None:
            figures.append(f"{_duration(seconds)} left")
        if "train/loss" in metrics:
            figures.append(f"loss {float(metrics['train/loss']):.3f}")
        if "perf/samples_per_second" in metrics:
            figures.append(f"{float(metrics['perf/samples_per_second']):.1f} samples/s")
        best = self.checkpoints.best
        if best is not None and math.isfinite(best):
            monitored: MonitoredMetric = getattr(pl_module, "monitored", DICE)
            figures.append(f"best {monitored.words} {best:.3f}")
        return figures

    def _draw(self, **fields: Any) -> None:
        assert self._bar is not None
        self._bar.update(self._bar.task_ids[0], **fields)
        self._bar.refresh()
        self._drawn_at = self._clock()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _total_steps(trainer: Trainer, budget: TimeBudget | None) -> float | None:
    """None: the end is not known."""
    steps = float(trainer.estimated_stepping_batches)
    if budget is not None and budget.expected_steps is not None:
        steps = min(steps, budget.expected_steps)
    return steps if math.isfinite(steps) else None


def _ends_by_steps(trainer: Trainer, budget: TimeBudget | None) -> bool:
    """Whether a number of steps or epochs ends the run, and no time before it, as far as that is known."""
    limit = float(trainer.estimated_stepping_batches)
    return math.isfinite(limit) and limit == _total_steps(trainer, budget)


class ProgressLines(Callback):
    """Logs a line every few seconds and one per validation; in a log file a bar would be thousands of lines.

    Args:
        budget: of time; knows what is left, and how many steps that makes.
        every: seconds between lines.
        level: of these; `logging.DEBUG` writes them to `train.log` alone.
        clock: of seconds.
    """

    def __init__(
        self,
        budget: TimeBudget | None = None,
        every: float = 20.0,
        level: int = logging.INFO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self.every = every
        self.level = level
        self._clock = clock
        self._logged_at = clock()
        self._num_samples = 0  # since then
        # When this start of the run began to train, and after which step
        self._began_at = 0.0
        self._first_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > 0:
            log.info("resumed at step %d", trainer.global_step)
        self._began_at = self._clock()
        self._first_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_samples += len(batch["image"]) * trainer.world_size
        now = self._clock()
        seconds = now - self._logged_at
        if seconds < self.every:
            return
        log.log(
            self.level,
            "epoch %d, %s: loss %.4f, %.1f samples/s",
            trainer.current_epoch,
            self._how_far(trainer, pl_module, batch),
            float(trainer.callback_metrics.get("train/loss", math.nan)),
            self._num_samples / seconds,
        )
        self._logged_at = now
        self._num_samples = 0

    def _how_far(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> str:
        """`step 620 of about 1640, 11:48 left`."""
        step = trainer.global_step
        total = _total_steps(trainer, self.budget)
        if self.budget is not None and not _ends_by_steps(trainer, self.budget):
            of_total = "" if total is None else f" of about {total:.0f}"
            return f"step {step}{of_total}, {_duration(self.budget.seconds_left())} left"
        if total is None or step == self._first_step:
            return f"step {step}"
        growing = getattr(pl_module, "growing_patch", None)
        work_done: float = step - self._first_step
        work_left: float = total - step
        if growing is not None:
            patch = batch["image"].shape[2:]
            work_done *= growing.costs(patch, self._first_step / total, step / total).mean()
            work_left *= growing.costs(patch, step / total).mean()
        seconds_left = (self._clock() - self._began_at) * work_left / work_done
        if self.budget is not None:
            seconds_left = min(seconds_left, self.budget.seconds_left())
        return f"step {step} of {total:.0f}, about {_duration(seconds_left)} left"

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        monitored: MonitoredMetric = getattr(pl_module, "monitored", DICE)
        if not trainer.sanity_checking and monitored.name in trainer.callback_metrics:
            log.info(
                "epoch %d, step %d: validation %s %.4f",
                trainer.current_epoch,
                trainer.global_step,
                monitored.words,
                float(trainer.callback_metrics[monitored.name]),
            )
        # The time of a validation does not count as training
        self._logged_at = self._clock()
        self._num_samples = 0


def _duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes_left:02}:{seconds_left:02}"
    return f"{minutes_left}:{seconds_left:02}"


class _Curve(Callback):
    """Logs what a step was trained with every `log_every_n_steps` steps, and in the last one."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._values = self.values(trainer, pl_module, batch) if every else {}
        if every and (trainer.global_step + 1) % every == 0:
            self._log(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning then writes a row whatever the step, with the last values it was given
        if ends_now(trainer):
            self._log(pl_module)

    def _log(self, pl_module: LightningModule) -> None:
        for name, value in self._values.items():
            pl_module.log(name, value, rank_zero_only=True)

    def values(self, trainer: Trainer, pl_module: Any, batch: Any) -> dict[str, float]:
        raise NotImplementedError


class LearningRate(_Curve):
    """Logs `train/lr`, and `train/lr_2`, ... for parameter groups with further base learning rates."""

    def values(self, trainer: Trainer, pl_module: Any, batch: Any) -> dict[str, float]:
        # By base learning rate: a schedule multiplies it, so groups with the same one share a curve
        rates: dict[float, float] = {}
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                rate = float(group["lr"])
                # Schedules write the base learning rate into the groups
                base_rate = float(group.get("initial_lr", rate))
                rates.setdefault(base_rate, rate)
        return {
            "train/lr" if number == 1 else f"train/lr_{number}": rate
            for number, rate in enumerate(rates.values(), 1)
        }


class PatchSize(_Curve):
    """Logs `train/patch_voxels`, the voxels of a training patch, where it grows during the run."""

    def values(self, trainer: Trainer, pl_module: Any, batch: Any) -> dict[str, float]:
        if pl_module.growing_patch is None:
            return {}
        whole_patch = batch["image"].shape[2:]
        size = pl_module.growing_patch.size(whole_patch, pl_module.lr_schedulers().progress)
        return {"train/patch_voxels": float(prod(size))}
