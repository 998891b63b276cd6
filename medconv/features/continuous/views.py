"""Pictures of images beside predictions and references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from medconv.data.io.grids import to_canonical
from medconv.data.loading.patch import Batch
from medconv.features.continuous.targets import ContinuousTargets
from medconv.features.pictures.drawing import heat

if TYPE_CHECKING:  # `evaluate` draws planes, too, and loads no training
    from medconv.features.pictures.callbacks import Picture


def beside(images: Mapping[str, np.ndarray], spacing_mm: Sequence[float]) -> np.ndarray:
    """The middle planes of images, a column each. Shape: each (*spatial) -> (height, width, 3) uint8."""
    return np.concatenate([heat(image[None], None, spacing_mm) for image in images.values()], axis=1)


class ImageViews:
    """The first validation cases, and those with the lowest PSNR: image, prediction, reference and error."""

    def __init__(self, targets: ContinuousTargets, cases: int, spacing_mm: Sequence[float]) -> None:
        self.targets = targets
        self.cases = cases
        self.spacing_mm = spacing_mm
        self._num_shown = 0  # cases so far
        self._worst: list[tuple[float, str, np.ndarray]] = []  # PSNR, lowest first

    def sample(self, image: np.ndarray, label: Tensor, number: int) -> Picture:
        images = {"image": image, "target": label[0].float().cpu().numpy()}
        return f"train/sample {number} (image, target)", beside(images, self.spacing_mm)

    def validated(self, batch: Batch, predicted: Mapping[str, Any]) -> Iterator[Picture]:
        psnr = predicted["row"]["psnr"]
        is_first = self._num_shown < self.cases
        is_worst = psnr is not None and (len(self._worst) < self.cases or psnr < self._worst[-1][0])
        if not (is_first or is_worst):
            return
        picture = _of_case(predicted)
        if is_worst:
            # Drawn now: a picture takes far less memory than its case
            worst = [*self._worst, (psnr, predicted["case"], picture)]
            self._worst = sorted(worst, key=lambda each: each[0])[: self.cases]
        if is_first:
            self._num_shown += 1
            yield f"val/{predicted['case']} (image, prediction, reference, error)", picture

    def ended(self, rows: Mapping[str, Any]) -> tuple[list[Picture], str]:
        return [], ""

    def worst(self, module: Any) -> Iterator[Picture]:
        for psnr, case, picture in self._worst:
            yield f"worst/{case} (PSNR {psnr:.1f} dB)", picture


def _of_case(predicted: Mapping[str, Any]) -> np.ndarray:
    images = dict(predicted["images"])
    images["error"] = np.abs(images["prediction"] - images["reference"])
    return in_planes(images, predicted["grid"])


def in_planes(images: Mapping[str, np.ndarray], grid: Any) -> np.ndarray:
    """`beside` of native images, (X, Y, Z) each."""
    stacked, spacing_mm = to_canonical(np.stack(list(images.values())), grid)
    if grid.shape[2] == 1:
        stacked = stacked[..., 0]
    return beside(dict(zip(images, stacked, strict=True)), spacing_mm[: stacked.ndim - 1])
