"""What a validation does with a batch of whole images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from medconv.config import RunConfig
from medconv.data.loading.patch import Batch
from medconv.features.image_level.forward import mean_over_flips
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.inference.sliding_window import SlidingWindow
from medconv.training.validation import Validated, warn_of_nonfinite


@dataclass(frozen=True)
class ImageLevelValidation:
    """The outputs and labels of a batch of cases. Args: mirror_axes: of mirror test-time augmentation."""

    targets: ImageLevelTargets
    mirror_axes: Sequence[int]

    def __call__(
        self, network: Callable[[Tensor], Tensor], batch: Batch, keeps_prediction: bool = False
    ) -> Validated:
        outputs = mean_over_flips(network, batch["image"], self.targets, self.mirror_axes)
        output_rows = outputs.tolist()
        label_rows = map(self.targets.label_values, batch["label"].float().tolist())
        rows = {}
        for case, case_outputs, values in zip(batch["case"], output_rows, label_rows, strict=True):
            if not all(map(math.isfinite, case_outputs)):
                warn_of_nonfinite(case)
            rows[case] = {"outputs": case_outputs, "values": values}
        return Validated(rows, {"case": batch["case"], "outputs": outputs})


def image_validation(
    config: RunConfig, targets: ImageLevelTargets, window: SlidingWindow
) -> ImageLevelValidation:
    """As `Family.validation`. Args: window: only its axes of test-time augmentation matter."""
    return ImageLevelValidation(targets, window.mirror_axes)
