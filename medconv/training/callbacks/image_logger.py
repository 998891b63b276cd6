"""TensorBoard images: training samples, and validation cases with reference and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from medconv.metrics.plots import pictures
from medconv.training.callbacks.worst_cases import WorstCases, label_text, score_table
from medconv.training.tasks.image_level import arrays
from medconv.utils.visualization import overlay


class ImageLogger(Callback):
    """Logs images to TensorBoard: the first augmented training samples, and validation cases.

    A validation case of segmentation is shown with its reference and prediction. For image-level targets
    each validation logs plots over all cases (ROC curves and the like); the end of training logs saliency
    maps of the worst cases.
    Args: spacing_mm: of the training samples. cases: how many samples and cases to show, from rank 0.
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
                picture = overlay(array, [_without_ignored(label[0], pl_module)], self.spacing_mm)
                self._show(trainer, f"train/sample {number} (image, label)", picture)
            else:
                picture = overlay(array, [], self.spacing_mm, focus=np.zeros(array.shape, bool))
                text = label_text(image_targets, label.tolist())
                self._show(trainer, f"train/sample {number} ({text})", picture)

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
            self._worst.update(pl_module.image_targets, batch, outputs["outputs"])  # type: ignore[arg-type]
            return
        if batch_idx >= self.cases:
            return
        image = batch["image"][0, 0].float().cpu().numpy()
        labels = [
            _without_ignored(label, pl_module) for label in (batch["label"][0, 0], outputs["prediction"])
        ]
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
            text = score_table(image_targets, *arrays(rows))
            logger.experiment.add_text("val/scores", text, trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the worst cases here, since the averaged weights that were validated are in place again."""
        if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            for tag, picture in self._worst.pictures(pl_module, self.spacing_mm):
                self._show(trainer, tag, picture)

    @staticmethod
    def _show(trainer: Trainer, tag: str, picture: np.ndarray) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(tag, picture, trainer.global_step, dataformats="HWC")


def _without_ignored(label: Tensor, pl_module: LightningModule) -> np.ndarray:
    """A label map with ignored voxels set to background, so that they are not painted."""
    ignore = getattr(getattr(pl_module, "targets", None), "ignore", None)
    array = label.cpu().numpy().astype(np.int16)
    return array if ignore is None else np.where(array == ignore, 0, array)
