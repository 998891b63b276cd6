"""Checks that all ranks resume at the same step."""

from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import distributed


class ResumeStepCheck(Callback):
    """Checks that all processes resume at the same step: if they do not share the run folder, only some find
    a checkpoint.
    """

    def __init__(self) -> None:
        self._step = 0

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._step = checkpoint["global_step"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before the sanity check, which only new runs do."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        steps: list[int] = [0] * distributed.get_world_size()
        distributed.all_gather_object(steps, self._step)
        if len(set(steps)) > 1:
            raise ValueError(
                f"{trainer.default_root_dir}: not the same folder for all processes, they would resume at "
                f"steps {steps}; it must be on a file system that all machines share"
            )
