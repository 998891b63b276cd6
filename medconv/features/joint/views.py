"""TensorBoard pictures: label maps under the values of their image, and plots of the values of all cases."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from medconv.data.loading.patch import Batch
from medconv.features.joint.scores import with_values
from medconv.features.joint.targets import JointTargets
from medconv.features.pictures.callbacks import LabelMapViews, Picture


class JointViews(LabelMapViews):
    """As of label maps, with the values in the titles."""

    def __init__(self, targets: JointTargets, cases: int, spacing_mm: Sequence[float]) -> None:
        super().__init__(targets.of_answers, cases, spacing_mm)
        self.of_image = targets.of_image
        self._values: dict[str, str] = {}  # title to what follows it

    def validated(self, batch: Batch, predicted: Mapping[str, Any]) -> Iterator[Picture]:
        row = predicted["row"]
        self._values = {"prediction": self.of_image.prediction_text(row["outputs"])}
        if row["values"] is not None:
            self._values["reference"] = self.of_image.label_text(batch["values"].tolist())
        yield from super().validated(batch, predicted)

    def ended(self, rows: Mapping[str, Any]) -> tuple[list[Picture], str]:
        scored = list(with_values(rows).values())
        if not scored:
            return [], ""
        outputs, truth = self.of_image.arrays(scored)
        plots = self.of_image.pictures(outputs, truth)
        pictures = [(f"val/value_{name}", picture) for name, picture in plots.items()]
        return pictures, self.of_image.scores.text(outputs, truth)

    def _picture(
        self, image: np.ndarray, labels: Mapping[str, Tensor], spacing_mm: Sequence[float]
    ) -> np.ndarray:
        titled = {}
        for title, label in labels.items():
            value = self._values.get(title)
            titled[f"{title}: {value}" if value else title] = label
        return super()._picture(image, titled, spacing_mm)
