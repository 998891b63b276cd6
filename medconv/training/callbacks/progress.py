"""What runs beside the training loop: the time budget, the last validation, pictures, the progress bar."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from medconv.targets.monitor import DICE, MonitoredMetric

log = logging.getLogger(__name__)


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
            log.info(
                "epoch %d, step %d: loss %.4f, %.1f samples/s",
                trainer.current_epoch,
                trainer.global_step,
                loss,
                speed,
            )
            self._said, self._samples = now, 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        goal: MonitoredMetric = getattr(pl_module, "goal", DICE)
        if not trainer.sanity_checking and goal.name in trainer.callback_metrics:
            score, where = (
                float(trainer.callback_metrics[goal.name]),
                (trainer.current_epoch, trainer.global_step),
            )
            log.info("epoch %d, step %d: validation %s %.4f", *where, goal.words, score)
        self._said, self._samples = time.monotonic(), 0
