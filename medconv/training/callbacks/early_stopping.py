"""Reactions to validations without progress: the run stops early, or its learning rate is lowered."""

import logging
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks

from medconv.training.checkpoint.resumable_loop import ends_now
from medconv.training.optim.lr_schedulers import PlateauSchedule, check_patience

log = logging.getLogger(__name__)


class EarlyStopping(callbacks.EarlyStopping):
    """Stops after `patience` consecutive validations that do not beat the best `monitor` by `min_delta`.

    Unlike Lightning's: rank 0 decides for all ranks, and NaN is no progress. Training runs for at least
    the trainer's `min_steps` and `min_epochs`. The learning rate schedule does not reach its end.

    Args:
        monitor: name of the metric.
        patience: number of validations.
        min_delta: more than this beyond the best value is progress.
        mode: `max` if more is better, else `min`.
    Attributes:
        reason: why training stopped early; None: it did not.
    Raises:
        ValueError: values out of range; in its hooks: no metric has the name `monitor`.
    """

    def __init__(
        self, monitor: str = "val/dice", patience: int = 20, min_delta: float = 0.0, mode: str = "max"
    ) -> None:
        check_patience(patience, min_delta, mode)
        super().__init__(
            monitor=monitor,
            min_delta=min_delta,
            patience=patience,
            mode=mode,
            check_finite=False,
            check_on_train_epoch_end=False,
        )
        self.reason: str | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning's state holds the patience, too; the current config's counts
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run may have been killed after the validation that exhausted the patience."""
        validates_first = getattr(trainer.fit_loop.epoch_loop, "owed", False)
        if self.wait_count >= self.patience and not validates_first:
            self._stop(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value = torch.tensor(_metric(trainer, self.monitor, "EarlyStopping"))
        should_stop, _ = self._evaluate_stopping_criteria(value)
        if should_stop:
            self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        """Only once Lightning may stop: it would remember the request after a later, better validation."""
        if ends_now(trainer) or not trainer.fit_loop._can_stop_early:
            return
        trainer.should_stop = True
        self.reason = (
            f"{self.monitor} was not better than {self.best_score:.4f} "
            f"in the last {self.wait_count} validations"
        )
        log.info(
            "epoch %d, step %d: stopped early, %s", trainer.current_epoch, trainer.global_step, self.reason
        )


class Plateau(Callback):
    """Passes the monitored metric of each validation to the schedule of `scheduler=plateau`."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        for config in trainer.lr_scheduler_configs:
            schedule = config.scheduler
            if not isinstance(schedule, PlateauSchedule):
                continue
            level_before = schedule.level
            schedule.validated(_metric(trainer, schedule.monitor, "PlateauSchedule"))
            if schedule.level < level_before:
                step = trainer.global_step
                log.info("step %d: learning rate lowered to %.3g times the base", step, schedule.level)


def ended(trainer: Trainer) -> dict[str, Any] | None:
    """Step and reason of early stopping; None: the run did not stop early."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping) and callback.reason:
            return {"step": trainer.global_step, "reason": callback.reason}
    return None


def _metric(trainer: Trainer, monitor: str, reader: str) -> float:
    """Rank 0's value, since some metrics exist on rank 0 only.

    Args:
        monitor: name of the metric.
        reader: the class with the argument `monitor`, for the message.
    Raises:
        ValueError: no such metric.
    """
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    value, names = trainer.strategy.broadcast((metrics.get(monitor), sorted(metrics)))
    if value is None:
        raise ValueError(f"{reader}: monitor={monitor}: no such metric; there are {', '.join(names)}")
    return float(value)
