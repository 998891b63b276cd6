"""What TensorBoard shows of cases: label maps as overlays; whole images by plots, scores and worst cases."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from medconv.data.loading.patch import Batch
from medconv.inference import saliency
from medconv.metrics.visualization import overlay
from medconv.targets import Targets
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets

log = logging.getLogger(__name__)
Picture = tuple[str, np.ndarray]  # a tag, and (height, width, 3) uint8


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


def views_of(targets: Targets, cases: int, spacing_mm: Sequence[float]) -> CaseViews:
    """The views for a kind of targets.

    Args:
        cases: how many to show at most.
        spacing_mm: of the training samples.
    """
    if isinstance(targets, ImageLevelTargets):
        return ImageLevelViews(targets, cases, spacing_mm)
    assert isinstance(targets, SegmentationTargets)
    return LabelMapViews(targets, cases, spacing_mm)


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


@dataclass(frozen=True)
class _WrongCase:
    """A case with its error, by which cases are sorted."""

    error: float
    case: str
    image: Tensor
    values: list[float]


class ImageLevelViews:
    """Plots over all cases, and saliency maps of the validation cases with the largest errors, of those that
    this process has validated.
    """

    def __init__(self, targets: ImageLevelTargets, cases: int, spacing_mm: Sequence[float]) -> None:
        self.targets = targets
        self.cases = cases
        self.spacing_mm = spacing_mm
        self._worst: list[_WrongCase] = []  # largest error first

    def sample(self, image: np.ndarray, label: Tensor, number: int) -> Picture:
        # Without anything to focus on, planes through the middle
        nothing = np.zeros(image.shape, bool)
        picture = overlay(image, [], self.spacing_mm, focus=nothing)
        label_text = self.targets.label_text(label.tolist())
        return f"train/sample {number} ({label_text})", picture

    def validated(self, batch: Batch, predicted: Mapping[str, Any]) -> Iterator[Picture]:
        outputs = predicted["outputs"].float().cpu().numpy()
        values = batch["label"].float().cpu().numpy()
        errors = self.targets.errors(outputs, values)
        largest_first = np.argsort(-errors, kind="stable")
        for index in largest_first[: self.cases]:
            is_among_worst = len(self._worst) < self.cases or errors[index] > self._worst[-1].error
            if not is_among_worst:
                continue
            wrong = _WrongCase(
                error=float(errors[index]),
                case=batch["case"][index],
                image=batch["image"][index].detach().float().cpu().clone(),
                values=values[index].tolist(),
            )
            self._worst = sorted([*self._worst, wrong], key=lambda case: -case.error)[: self.cases]
        return iter(())

    def ended(self, rows: Mapping[str, Any]) -> tuple[list[Picture], str]:
        outputs, truth = self.targets.arrays(list(rows.values()))
        plots = self.targets.pictures(outputs, truth)
        pictures = [(f"val/{name}", picture) for name, picture in plots.items()]
        return pictures, self.targets.score_text(outputs, truth)

    def worst(self, module: Any) -> Iterator[Picture]:
        for wrong in self._worst:
            label = self.targets.label_text(wrong.values)
            prediction = self.targets.prediction_text(module.rows[wrong.case]["outputs"])
            try:
                image = wrong.image.to(module.device)
                picture = saliency.overlay(module.network, image, self.spacing_mm)
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                # A network that cannot be explained is no reason to lose a run
                log.warning("no saliency maps of the worst cases: %s", reason)
                return
            yield f"worst/{wrong.case} ({label}, predicted {prediction})", picture
