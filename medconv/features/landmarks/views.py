"""Pictures of images under their heatmaps."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from medconv.data.loading.patch import Batch
from medconv.features.landmarks.targets import LandmarkTargets
from medconv.features.pictures.callbacks import Picture
from medconv.metrics.visualization import heat


class PointViews:
    """The first validation cases; planes cross at the highest peak of all points."""

    def __init__(self, targets: LandmarkTargets, cases: int, spacing_mm: Sequence[float]) -> None:
        self.targets = targets
        self.cases = cases
        self.spacing_mm = spacing_mm
        self._num_shown = 0

    def sample(self, image: np.ndarray, label: Tensor, number: int) -> Picture:
        strength = label.float().amax(0).clamp(0, 1).cpu().numpy()
        return f"train/sample {number} (image, heatmaps)", heat(image[None], strength, self.spacing_mm)

    def validated(self, batch: Batch, predicted: Mapping[str, Any]) -> Iterator[Picture]:
        if self._num_shown >= self.cases:
            return
        self._num_shown += 1
        image = batch["image"][0, 0].float().cpu().numpy()
        picture = heat(image[None], predicted["heatmap"], batch["spacing_mm"])
        yield f"val/{predicted['case']} (image, predicted heatmaps)", picture

    def ended(self, rows: Mapping[str, Any]) -> tuple[list[Picture], str]:
        return [], ""

    def worst(self, module: Any) -> Iterator[Picture]:
        return iter(())
