"""The learning rate as a curve, beside the loss."""

from typing import Any

from lightning import Callback, LightningModule, Trainer


class LearningRate(Callback):
    """Logs `train/lr`, and `train/lr_2`, ... for parameter groups with further base learning rates."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or (trainer.global_step + 1) % every:
            return
        rates: dict[float, float] = {}  # by base learning rate, which a schedule multiplies
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                rates.setdefault(float(group.get("initial_lr", group["lr"])), float(group["lr"]))
        for number, rate in enumerate(rates.values(), 1):
            pl_module.log("train/lr" if number == 1 else f"train/lr_{number}", rate, rank_zero_only=True)
