"""Validates after the last step of a run, so that its weights are scored and saved."""

from typing import Any

from lightning import Callback, LightningModule, Trainer


class FinalValidation(Callback):
    """Makes Lightning validate after the last step, even in the middle of an epoch.

    Lightning alone stops at `max_steps` without a validation or a checkpoint.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if ends_now(trainer):
            trainer.should_stop = True
            # Lightning has no other way to ask for a validation after this batch
            trainer.check_val_every_n_epoch = 1


def ends_now(trainer: Trainer) -> bool:
    """Whether a run ends after the present batch."""
    in_last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
    ends_by_epochs = in_last_epoch and trainer.is_last_batch
    # Without a limit, max_steps is -1
    ends_by_steps = 0 <= trainer.max_steps <= trainer.global_step
    return trainer.should_stop or ends_by_epochs or ends_by_steps
