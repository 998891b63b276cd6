"""Networks in a `LoadedModel` without training: for volumes, and for 2D images."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.inference.load import LoadedModel
from medconv.inference.sliding_window import SlidingWindow
from medconv.targets.label_map import LabelMapTargets


def segmentation(network: nn.Module, patch_size: tuple[int, ...] = (8, 8, 8), **more: Any) -> LoadedModel:
    """Background and one class in volumes of one channel, spacing 1 mm, without normalisation."""
    classes = ("background", "a")
    return LoadedModel(
        network.eval(),
        PreprocessingConfig(3, (1.0, 1.0, 1.0), ("none",), ({},)),
        SlidingWindow(patch_size),
        classes,
        LabelMapTargets.of_classes(classes),
        ("MRI",),
        "32-true",
        torch.contiguous_format,
        **more,
    )


def image_level(
    network: nn.Module,
    image_targets: ImageLevelTargets,
    size: tuple[int, int] = (8, 8),
    mirror_axes: tuple[int, ...] = (),
    **more: Any,
) -> LoadedModel:
    """For 2D images of one channel, all of this size in pixels, without normalisation."""
    return LoadedModel(
        network.eval(),
        PreprocessingConfig(2, (1.0, 1.0), ("none",), ({},), frame=size),
        SlidingWindow(size, mirror_axes=mirror_axes),
        image_targets.names,
        image_targets,
        ("grey",),
        "32-true",
        torch.contiguous_format,
        **more,
    )
