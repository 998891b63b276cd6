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
        # By base learning rate: a schedule multiplies it, so groups with the same one share a curve
        rates: dict[float, float] = {}
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                rate = float(group["lr"])
                # Schedules write the base learning rate into the groups
                base_rate = float(group.get("initial_lr", rate))
                rates.setdefault(base_rate, rate)
        for number, rate in enumerate(rates.values(), 1):
            name = "train/lr" if number == 1 else f"train/lr_{number}"
            pl_module.log(name, rate, rank_zero_only=True)
