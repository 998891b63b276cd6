"""Progress of a training: a bar in a terminal, lines in a log."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from medconv.targets.monitor import DICE, MonitoredMetric

log = logging.getLogger(__name__)


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar without the version number; for terminals."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return {k: v for k, v in super().get_metrics(trainer, pl_module).items() if k != "v_num"}


class ProgressLines(Callback):
    """Logs a line every few seconds and one per validation; in a log file a bar would be thousands of lines.

    Args: every: seconds between lines. clock: of seconds.
    """

    def __init__(self, every: float = 20.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.every, self._clock, self._logged_at, self._samples = every, clock, clock(), 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += len(batch["image"]) * trainer.world_size
        now = self._clock()
        if now - self._logged_at >= self.every:
            loss = float(trainer.callback_metrics.get("train/loss", math.nan))
            speed = self._samples / (now - self._logged_at)
            position = trainer.current_epoch, trainer.global_step
            log.info("epoch %d, step %d: loss %.4f, %.1f samples/s", *position, loss, speed)
            self._logged_at, self._samples = now, 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        monitored: MonitoredMetric = getattr(pl_module, "monitored", DICE)
        if not trainer.sanity_checking and monitored.name in trainer.callback_metrics:
            position = trainer.current_epoch, trainer.global_step
            score = float(trainer.callback_metrics[monitored.name])
            log.info("epoch %d, step %d: validation %s %.4f", *position, monitored.words, score)
        self._logged_at, self._samples = self._clock(), 0
