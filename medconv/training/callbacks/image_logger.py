"""TensorBoard images: training samples, and validation cases with reference and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from medconv.metrics.plots import pictures
from medconv.training.callbacks.worst_cases import WorstCases, card, said
from medconv.training.tasks.image_level import arrays
from medconv.utils.visualization import overlay


class ImageLogger(Callback):
    """In TensorBoard: the first training samples, as augmented, and image, reference and prediction of
    validation cases.

    Of whole images all validation cases in one picture, at the end where the network looked in the most wrong
    ones.
    Args: cases: how many, on rank 0. spacing_mm: of training samples.
    """

    def __init__(self, spacing_mm: Sequence[float], cases: int = 3) -> None:
        self.spacing_mm, self.cases, self._samples = tuple(spacing_mm), cases, 0
        self._worst = WorstCases(cases)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._samples >= self.cases or trainer.global_step or not trainer.is_global_zero:
            return
        image_targets = getattr(pl_module, "image_targets", None)
        for image, label, number in zip(
            batch["image"], batch["label"], map(int, batch["sample"]), strict=True
        ):
            if self._samples >= self.cases:
                return
            self._samples += 1
            array = image[0].float().cpu().numpy()
            if image_targets is None:
                picture = overlay(array, [_known(label[0], pl_module)], self.spacing_mm)
                self._show(trainer, f"train/sample {number} (image, label)", picture)
            else:
                picture = overlay(array, [], self.spacing_mm, focus=np.zeros(array.shape, bool))
                self._show(trainer, f"train/sample {number} ({said(image_targets, label.tolist())})", picture)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._worst = WorstCases(self.cases)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        if getattr(pl_module, "image_targets", None) is not None:
            self._worst.see(pl_module.image_targets, batch, outputs["outputs"])  # type: ignore[arg-type]
            return
        if batch_idx >= self.cases:
            return
        image = batch["image"][0, 0].float().cpu().numpy()
        labels = [_known(label, pl_module) for label in (batch["label"][0, 0], outputs["prediction"])]
        picture = overlay(image, labels, batch["spacing_mm"])
        self._show(trainer, f"val/{outputs['case']} (image, reference, prediction)", picture)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        image_targets, rows = getattr(pl_module, "image_targets", None), getattr(pl_module, "rows", {})
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if (
            image_targets is None
            or not rows
            or trainer.sanity_checking
            or not (trainer.is_global_zero and loggers)
        ):
            return
        for name, picture in pictures(image_targets, *arrays(rows)).items():
            self._show(trainer, f"val/{name}", picture)
        for logger in loggers:
            logger.experiment.add_text("val/scores", card(image_targets, *arrays(rows)), trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """By the weights that answered: averaged ones, which are not there at the end of a validation,
        stay from here on.
        """
        if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            for tag, picture in self._worst.pictures(pl_module, self.spacing_mm):
                self._show(trainer, tag, picture)

    @staticmethod
    def _show(trainer: Trainer, tag: str, picture: np.ndarray) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(tag, picture, trainer.global_step, dataformats="HWC")


def _known(label: Tensor, pl_module: LightningModule) -> np.ndarray:
    """A label map whose voxels to ignore are not painted."""
    ignore = getattr(getattr(pl_module, "targets", None), "ignore", None)
    array = label.cpu().numpy().astype(np.int16)
    return array if ignore is None else np.where(array == ignore, 0, array)
