"""`early_stopping=patience`: a run ends after validations without progress."""

import logging
import math
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch import callbacks

from medconv.features.plateau.schedule import check_patience
from medconv.training.callbacks.validated import begins_from_another_run, monitored_value
from medconv.training.checkpoint.resumable_loop import ends_now

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
        stop_reason: why training stopped early; None: it did not.
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
        self.stop_reason: str | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning's state holds the patience, too; the current config's counts
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run may have been killed after the validation that exhausted the patience.

        One that begins from another run's checkpoint counts its own validations.
        """
        if begins_from_another_run(trainer):
            self.wait_count = 0
            self.best_score = torch.tensor(-math.inf if self.mode == "max" else math.inf)
        validates_first = getattr(trainer.fit_loop.epoch_loop, "owed", False)
        if self.wait_count >= self.patience and not validates_first:
            self._stop(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value = torch.tensor(monitored_value(trainer, self.monitor, "EarlyStopping"))
        should_stop, _ = self._evaluate_stopping_criteria(value)
        if should_stop and not ends_now(trainer):
            self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        """Only once Lightning may stop: it would remember the request after a later, better validation."""
        if trainer.should_stop or not trainer.fit_loop._can_stop_early:
            return
        trainer.should_stop = True
        self.stop_reason = (
            f"{self.monitor} was not better than {self.best_score:.4f} "
            f"in the last {self.wait_count} validations"
        )
        log.info(
            "epoch %d, step %d: stopped early, %s",
            trainer.current_epoch,
            trainer.global_step,
            self.stop_reason,
        )
