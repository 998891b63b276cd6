"""TensorBoard pictures of whole images: plots over all validation cases, saliency maps of the worst ones."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from medconv.data.loading.patch import Batch
from medconv.features.image_level import saliency
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.features.pictures.callbacks import Picture
from medconv.features.pictures.drawing import overlay
from medconv.utils.errors import first_line

log = logging.getLogger(__name__)


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
        return pictures, self.targets.scores.text(outputs, truth)

    def worst(self, module: Any) -> Iterator[Picture]:
        for wrong in self._worst:
            label = self.targets.label_text(wrong.values)
            outputs = module.rows[wrong.case]["outputs"]
            prediction = self.targets.prediction_text(outputs)
            try:
                image = wrong.image.to(module.device)
                shown = self.targets.shown_output(np.array(outputs))
                picture = saliency.overlay(module.network, image, self.spacing_mm, shown)
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                # A network that cannot be explained is no reason to lose a run
                log.warning("no saliency maps of the worst cases: %s", first_line(error))
                return
            yield f"worst/{wrong.case} ({label}, predicted {prediction})", picture
