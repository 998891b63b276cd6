"""The loss of a label map and of an image's values."""

import math
from typing import Any

from torch import nn

from medconv.features.image_level.losses import CrossEntropy, RegressionLoss
from medconv.features.image_level.targets import ImageLevelTargets

# by `default_loss` of the image's targets
_DEFAULTS = {"cross_entropy": CrossEntropy(), "bce": CrossEntropy(exclusive=False), "huber": RegressionLoss()}


class JointLoss(nn.Module):
    """The loss of the label map plus `value_weight` times that of the image's values.

    Args:
        segmentation: a loss of label maps.
        value: a loss of image-level targets; None: cross-entropy of classes and findings, Huber of numbers.
        value_weight: 0 or more.
    Raises:
        ValueError: another weight.
    """

    kinds = ("joint",)

    def __init__(self, segmentation: Any, value: Any = None, value_weight: float = 1.0) -> None:
        super().__init__()
        if type(value_weight) not in (int, float) or not 0 <= value_weight < math.inf:
            raise ValueError(f"value_weight must be a number of 0 or more, got {value_weight}")
        self.segmentation = segmentation
        self.value = value
        self.value_weight = float(value_weight)

    def of(self, targets: ImageLevelTargets) -> Any:
        """The loss of the image's values. Raises: ValueError: such targets have no default."""
        loss = self.value or _DEFAULTS.get(targets.default_loss)
        if loss is None:
            raise ValueError(f"value is needed: a loss for {targets.kind}")
        return loss
