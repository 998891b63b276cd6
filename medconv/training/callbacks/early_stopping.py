"""Reactions to validations without progress: the run stops early, or its learning rate is lowered."""

import logging
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks

from medconv.training.callbacks.final_validation import ends_now
from medconv.training.optim.lr_schedulers import PlateauSchedule, check_patience

log = logging.getLogger(__name__)


class EarlyStopping(callbacks.EarlyStopping):
    """Stops after `patience` consecutive validations that do not beat the best `monitor` by `min_delta`.

    Unlike Lightning's: rank 0 decides for all ranks, and NaN is no progress. Training runs for at least
    `trainer.min_steps` and `min_epochs`. The learning rate schedule does not reach its end.
    Args: mode: `max` if more is better, else `min`.
    Attributes: reason: why training stopped early; None: it did not.
    """

    def __init__(
        self, monitor: str = "val/dice", patience: int = 20, min_delta: float = 0.0, mode: str = "max"
    ) -> None:
        check_patience(patience, min_delta, mode)
        super().__init__(
            monitor, min_delta, patience, mode=mode, check_finite=False, check_on_train_epoch_end=False
        )
        self.reason: str | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})  # that of the present config

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run may have been killed after the validation that exhausted the patience."""
        if self.wait_count >= self.patience and not getattr(trainer.fit_loop.epoch_loop, "owed", False):
            self._stop(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value = _value(trainer, self.monitor, "early_stopping.monitor")
        if self._evaluate_stopping_criteria(torch.tensor(value))[0]:
            self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        """Only once Lightning may stop: it would remember the request after a later, better validation."""
        if ends_now(trainer) or not trainer.fit_loop._can_stop_early:
            return
        trainer.should_stop = True
        last = f"the last {self.wait_count} validations"
        self.reason = f"{self.monitor} was not better than {self.best_score:.4f} in {last}"
        position = trainer.current_epoch, trainer.global_step
        log.info("epoch %d, step %d: stopped early, %s", *position, self.reason)


class Plateau(Callback):
    """Passes the monitored metric of each validation to the schedule of `scheduler=plateau`."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for schedule in (config.scheduler for config in trainer.lr_scheduler_configs):
            if isinstance(schedule, PlateauSchedule) and not trainer.sanity_checking:
                before = schedule.level
                schedule.validated(_value(trainer, schedule.monitor, "scheduler.monitor"))
                if schedule.level < before:
                    lowered = "step %d: learning rate lowered to %.3g times the base"
                    log.info(lowered, trainer.global_step, schedule.level)


def ended(trainer: Trainer) -> dict[str, Any] | None:
    """Step and reason of early stopping; None: the run did not stop early."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, EarlyStopping) and callback.reason:
            return {"step": trainer.global_step, "reason": callback.reason}
    return None


def _value(trainer: Trainer, monitor: str, key: str) -> float:
    """Rank 0's value, since some metrics exist on rank 0 only. Raises: ValueError: no such metric."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    value, names = trainer.strategy.broadcast((metrics.get(monitor), sorted(metrics)))
    if value is None:
        raise ValueError(f"{key}={monitor}: no such metric; there are {', '.join(names)}")
    return float(value)
