"""A callback that saves the weights of our training at given times, for the recipe benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

import medconv
from benchmarks.peers import training
from medconv.training.callbacks.time_budget import TimeBudget


class Weights(Callback):
    """Writes checkpoints at the times of a job. Args: job: its file."""

    def __init__(self, job: str) -> None:
        self.job = training.Job.read(Path(job))
        self.clock = training.Clock(self.job.seconds)
        self.snapshots = training.Snapshots(self.job, self.clock, ".ckpt")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before = self.clock.left_out
        if self.snapshots.after_step(trainer.global_step, trainer.save_checkpoint):
            for budget in (callback for callback in trainer.callbacks if isinstance(callback, TimeBudget)):  # type: ignore[attr-defined]
                budget.exclude(self.clock.left_out - before)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        about = {
            "name": f"medconv {medconv.__version__}",
            "parameters": sum(weight.numel() for weight in pl_module.parameters()),
            "precision": str(trainer.precision),
            "torch": torch.__version__,
        }
        self.snapshots.finish(trainer.global_step, trainer.save_checkpoint, **about)
