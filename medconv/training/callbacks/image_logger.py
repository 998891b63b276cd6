"""TensorBoard images: training samples, and validation cases with reference and prediction."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from medconv.training.callbacks.case_views import CaseViews, Picture, views_of


class ImageLogger(Callback):
    """Logs images to TensorBoard: the first augmented training samples, and validation cases.

    A validation case of segmentation is shown with its reference and prediction. For image-level targets
    each validation logs plots over all cases (ROC curves and the like); the end of training logs saliency
    maps of the worst cases.
    Args: spacing_mm: of the training samples. cases: how many samples and cases to show, from rank 0.
    """

    def __init__(self, spacing_mm: Sequence[float], cases: int = 3) -> None:
        self.spacing_mm, self.cases, self._samples = tuple(spacing_mm), cases, 0
        self._views: CaseViews | None = None  # of the last validation

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        left = self.cases - self._samples
        if left <= 0 or trainer.global_step or not trainer.is_global_zero:
            return
        views = views_of(pl_module.targets, self.cases, self.spacing_mm)
        samples = zip(batch["image"][:left], batch["label"][:left], map(int, batch["sample"]), strict=False)
        for image, label, number in samples:
            self._samples += 1
            self._show(trainer, [views.sample(image[0].float().cpu().numpy(), label, number)])

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._views = views_of(pl_module.targets, self.cases, self.spacing_mm)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._views is not None and trainer.is_global_zero and not trainer.sanity_checking:
            self._show(trainer, self._views.validated(batch, outputs))

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or not (trainer.is_global_zero and pl_module.rows and _boards(trainer)):
            return
        assert self._views is not None
        pictures, text = self._views.ended(pl_module.rows)
        self._show(trainer, pictures)
        for board in _boards(trainer) if text else ():
            board.experiment.add_text("val/scores", text, trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Logs the worst cases here, since the averaged weights that were validated are in place again."""
        if self._views is not None and _boards(trainer):
            self._show(trainer, self._views.worst(pl_module))

    @staticmethod
    def _show(trainer: Trainer, pictures: Iterable[Picture]) -> None:
        for tag, picture in pictures:
            for board in _boards(trainer):
                board.experiment.add_image(f"images/{tag}", picture, trainer.global_step, dataformats="HWC")


def _boards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
