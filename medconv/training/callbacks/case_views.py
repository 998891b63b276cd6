"""What TensorBoard shows of cases: label maps as overlays; whole images by plots, scores and worst cases."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

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

    def validated(self, batch: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterator[Picture]:
        """A validated batch. Args: shown: what the validation returned."""

    def ended(self, rows: Mapping[str, Any]) -> tuple[list[Picture], str]:
        """Plots and a text about all cases, from the rows of `validation`."""

    def worst(self, module: Any) -> Iterator[Picture]:
        """The worst cases, when training has ended."""


def views_of(targets: Targets, cases: int, spacing_mm: Sequence[float]) -> CaseViews:
    """Args: cases: how many to show at most."""
    if isinstance(targets, ImageLevelTargets):
        return ImageLevelViews(targets, cases, spacing_mm)
    assert isinstance(targets, SegmentationTargets)
    return LabelMapViews(targets, cases, spacing_mm)


class LabelMapViews:
    """The first validation cases, with reference and prediction."""

    def __init__(self, targets: SegmentationTargets, cases: int, spacing_mm: Sequence[float]) -> None:
        self.targets, self.cases, self.spacing_mm = targets, cases, spacing_mm
        self._shown = 0

    def sample(self, image: np.ndarray, label: Tensor, number: int) -> Picture:
        return f"train/sample {number}", self._picture(image, {"label": label[0]}, self.spacing_mm)

    def validated(self, batch: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterator[Picture]:
        if self._shown < self.cases:
            self._shown += 1
            image = batch["image"][0, 0].float().cpu().numpy()
            labels = {"reference": batch["label"][0, 0], "prediction": shown["prediction"]}
            picture = self._picture(image, labels, batch["spacing_mm"])
            yield f"val/{shown['case']}", picture

    def ended(self, rows: Mapping[str, Any]) -> tuple[list[Picture], str]:
        return [], ""

    def worst(self, module: Any) -> Iterator[Picture]:
        return iter(())

    def _picture(
        self, image: np.ndarray, labels: Mapping[str, Tensor], spacing_mm: Sequence[float]
    ) -> np.ndarray:
        arrays = [label.cpu().numpy().astype(np.int16) for label in labels.values()]
        if self.targets.ignore is not None:  # such voxels are not painted
            arrays = [np.where(array == self.targets.ignore, 0, array) for array in arrays]
        return overlay(image, arrays, spacing_mm, titles=["image", *labels], names=self.targets.value_names)


@dataclass(frozen=True)
class _WrongCase:
    error: float
    case: str
    image: Tensor
    outputs: list[float]
    values: list[float]


class ImageLevelViews:
    """Plots over all cases, and saliency maps of the validation cases with the largest errors, of those that
    this process has validated.
    """

    def __init__(self, targets: ImageLevelTargets, cases: int, spacing_mm: Sequence[float]) -> None:
        self.targets, self.cases, self.spacing_mm = targets, cases, spacing_mm
        self._worst: list[_WrongCase] = []  # largest error first

    def sample(self, image: np.ndarray, label: Tensor, number: int) -> Picture:
        picture = overlay(image, [], self.spacing_mm, focus=np.zeros(image.shape, bool))
        return f"train/sample {number} ({self.targets.label_text(label.tolist())})", picture

    def validated(self, batch: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterator[Picture]:
        predictions, values = shown["outputs"].float().cpu().numpy(), batch["label"].float().cpu().numpy()
        errors = self.targets.errors(predictions, values)
        for i in np.argsort(-errors, kind="stable")[: self.cases]:
            if len(self._worst) < self.cases or errors[i] > self._worst[-1].error:
                image = batch["image"][i].detach().float().cpu().clone()
                labels = predictions[i].tolist(), values[i].tolist()
                wrong = _WrongCase(float(errors[i]), batch["case"][i], image, *labels)
                self._worst = sorted([*self._worst, wrong], key=lambda case: -case.error)[: self.cases]
        return iter(())

    def ended(self, rows: Mapping[str, Any]) -> tuple[list[Picture], str]:
        outputs, truth = self.targets.arrays(list(rows.values()))
        pictures = self.targets.pictures(outputs, truth).items()
        return [(f"val/{name}", picture) for name, picture in pictures], self.targets.score_text(
            outputs, truth
        )

    def worst(self, module: Any) -> Iterator[Picture]:
        for wrong in self._worst:
            label, prediction = (
                self.targets.label_text(wrong.values),
                self.targets.prediction_text(wrong.outputs),
            )
            try:
                picture = saliency.overlay(module.network, wrong.image.to(module.device), self.spacing_mm)
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("no saliency maps of the worst cases: %s", reason)  # no reason to lose a run
                return
            yield f"worst/{wrong.case} ({label}, predicted {prediction})", picture
