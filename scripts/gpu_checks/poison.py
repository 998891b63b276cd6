"""A callback that spoils one batch of a training."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer


class Poison(Callback):
    """Makes the images of one batch NaN, on their device. Args: step: the batch, from 0."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.total_batch_idx == self.step:
            batch["image"].fill_(float("nan"))
