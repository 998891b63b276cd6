"""Adapts the configured loss to the run's targets."""

from __future__ import annotations

from typing import Any

from torch import nn

from medconv.config import Values
from medconv.targets.image_level import image_targets_of
from medconv.targets.segmentation import SegmentationTargets
from medconv.training.losses.image_level import ImageLevelLoss
from medconv.training.losses.segmentation import SegmentationLoss


def fitted_loss(loss: Any, derived: Values) -> nn.Module:
    """The loss, adapted to label maps or to image-level targets. Raises: ValueError: the two do not fit."""
    image_targets = image_targets_of(derived)
    if image_targets is None:
        return SegmentationLoss(
            loss, SegmentationTargets.from_plain(derived["targets"]), derived["spatial_dims"]
        )
    return ImageLevelLoss(loss, image_targets, derived.get("value_means"), derived.get("value_stds"))
