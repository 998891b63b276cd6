"""The size of growing patches as a curve, beside the loss."""

from math import prod
from typing import Any

from lightning import Callback, Trainer


class PatchSize(Callback):
    """Logs `train/patch_voxels`, the voxels of a training patch, where it grows during the run."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if pl_module.growing_patch is None or not every or (trainer.global_step + 1) % every:
            return
        whole_patch = batch["image"].shape[2:]
        size = pl_module.growing_patch.size(whole_patch, pl_module.lr_schedulers().progress)
        pl_module.log("train/patch_voxels", float(prod(size)), rank_zero_only=True)
