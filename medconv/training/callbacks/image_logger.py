"""TensorBoard images: training samples, and validation cases with reference and prediction."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning import Callback, Trainer

from medconv.training.callbacks.case_views import CaseViews, Picture, views_of
from medconv.training.loggers.tensorboard import boards


class ImageLogger(Callback):
    """Logs images to TensorBoard: the first augmented training samples, and validation cases.

    A validation case of segmentation is shown with its reference and prediction. For image-level targets
    each validation logs plots over all cases (ROC curves and the like). The end of training logs the worst
    cases of the last validation: those of the lowest Dice, or saliency maps of those with the largest error.

    Args:
        spacing_mm: of the training samples.
        cases: how many samples and cases to show, from rank 0.
    """

    def __init__(self, spacing_mm: Sequence[float], cases: int = 3) -> None:
        self.spacing_mm = tuple(spacing_mm)
        self.cases = cases
        self._num_samples = 0  # shown so far
        self._views: CaseViews | None = None  # of the last validation

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        num_left = self.cases - self._num_samples
        if num_left <= 0 or trainer.global_step or not trainer.is_global_zero:
            return
        views = views_of(pl_module.targets, self.cases, self.spacing_mm)
        images = batch["image"][:num_left]
        labels = batch["label"][:num_left]
        numbers = map(int, batch["sample"])
        for image, label, number in zip(images, labels, numbers, strict=False):
            self._num_samples += 1
            first_channel = image[0].float().cpu().numpy()
            self._show(trainer, [views.sample(first_channel, label, number)])

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
        all_boards = boards(trainer)
        has_rows = trainer.is_global_zero and pl_module.rows
        if trainer.sanity_checking or not has_rows or not all_boards:
            return
        assert self._views is not None
        pictures, text = self._views.ended(pl_module.rows)
        self._show(trainer, pictures)
        if text:
            for board in all_boards:
                board.experiment.add_text("val/scores", text, trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Logs the worst cases here, since the averaged weights that were validated are in place again."""
        if self._views is not None and boards(trainer):
            self._show(trainer, self._views.worst(pl_module))

    @staticmethod
    def _show(trainer: Trainer, pictures: Iterable[Picture]) -> None:
        for tag, picture in pictures:
            for board in boards(trainer):
                board.experiment.add_image(f"images/{tag}", picture, trainer.global_step, dataformats="HWC")
