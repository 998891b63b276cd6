"""TensorBoard pictures of training samples, of validation cases beside their references, and of the worst."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from lightning import Callback, Trainer
from torch import Tensor

from medconv.data.loading.patch import Batch
from medconv.metrics.visualization import overlay
from medconv.targets import Targets
from medconv.targets.segmentation import SegmentationTargets
from medconv.training.loggers.tensorboard import boards

Picture = tuple[str, np.ndarray]  # a tag, and (height, width, 3) uint8


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
        self.shows_predictions = True  # a validation then keeps what it predicted; see `Task`

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


def views_of(targets: Targets, cases: int, spacing_mm: Sequence[float]) -> "CaseViews":
    """The views for a kind of targets.

    Args:
        cases: how many to show at most.
        spacing_mm: of the training samples.
    """
    own_views = targets.family.own("views")
    if own_views:
        views: CaseViews = own_views(targets, cases, spacing_mm)
        return views
    assert isinstance(targets, SegmentationTargets)
    return LabelMapViews(targets, cases, spacing_mm)


class CaseViews(Protocol):
    """The pictures of a validation; a new object for each."""

    def sample(self, image: np.ndarray, label: Tensor, number: int) -> Picture:
        """A training sample. Shape: image (*spatial), label as in a batch."""

    def validated(self, batch: Batch, predicted: Mapping[str, Any]) -> Iterator[Picture]:
        """A validated batch. Args: predicted: what the validation returned."""

    def ended(self, rows: Mapping[str, Any]) -> tuple[list[Picture], str]:
        """Plots and a text about all cases, from the rows of `validation`."""

    def worst(self, module: Any) -> Iterator[Picture]:
        """The worst cases, when training has ended."""


@dataclass(frozen=True)
class _LowDice:
    """A case of segmentation with its mean Dice, by which cases are sorted."""

    dice: float
    case: str
    picture: np.ndarray


class LabelMapViews:
    """The first validation cases, and those with the lowest Dice, with reference and prediction."""

    def __init__(self, targets: SegmentationTargets, cases: int, spacing_mm: Sequence[float]) -> None:
        self.targets = targets
        self.cases = cases
        self.spacing_mm = spacing_mm
        self._num_shown = 0  # cases so far
        self._worst: list[_LowDice] = []  # lowest first

    def sample(self, image: np.ndarray, label: Tensor, number: int) -> Picture:
        labels = {"label": self.targets.label_map(label)}
        return f"train/sample {number}", self._picture(image, labels, self.spacing_mm)

    def validated(self, batch: Batch, predicted: Mapping[str, Any]) -> Iterator[Picture]:
        is_first = self._num_shown < self.cases
        dice = predicted["dice"]
        # Undefined without reference and prediction
        has_room = len(self._worst) < self.cases
        is_among_worst = dice is not None and (has_room or dice < self._worst[-1].dice)
        if not (is_first or is_among_worst):
            return
        image = batch["image"][0, 0].float().cpu().numpy()
        reference = self.targets.label_map(batch["label"][0])
        labels = {"reference": reference, "prediction": predicted["prediction"]}
        picture = self._picture(image, labels, batch["spacing_mm"])
        if is_among_worst:
            # Drawn now: a picture takes far less memory than its case
            worst = [*self._worst, _LowDice(dice, predicted["case"], picture)]
            self._worst = sorted(worst, key=lambda case: case.dice)[: self.cases]
        if is_first:
            self._num_shown += 1
            yield f"val/{predicted['case']}", picture

    def ended(self, rows: Mapping[str, Any]) -> tuple[list[Picture], str]:
        return [], ""

    def worst(self, module: Any) -> Iterator[Picture]:
        for case in self._worst:
            yield f"worst/{case.case} (Dice {case.dice:.3f})", case.picture

    def _picture(
        self, image: np.ndarray, labels: Mapping[str, Tensor], spacing_mm: Sequence[float]
    ) -> np.ndarray:
        """The image beside its label maps. Args: labels: by title."""
        arrays = [label.cpu().numpy().astype(np.int16) for label in labels.values()]
        ignore = self.targets.ignore
        if ignore is not None:  # such voxels are not painted
            arrays = [np.where(array == ignore, 0, array) for array in arrays]
        titles = ["image", *labels]
        return overlay(image, arrays, spacing_mm, titles=titles, names=self.targets.value_names)
