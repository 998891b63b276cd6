"""medconv/training/losses/build.py: the configured loss is adapted to the run's targets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.training.losses.build import fitted_loss
from medconv.training.losses.image_level import CrossEntropy, ImageLevelLoss, RegressionLoss
from medconv.training.losses.segmentation import DiceCrossEntropy, SegmentationLoss

LABEL_MAPS = {
    "image_targets": None,
    "targets": SegmentationTargets.of_classes(["background", "box"], ignore=9).plain(),
    "spatial_dims": 2,
}


def test_label_maps_get_a_loss_that_knows_the_ignored_value() -> None:
    loss = fitted_loss(DiceCrossEntropy(), LABEL_MAPS)
    assert isinstance(loss, SegmentationLoss) and loss.targets.ignore == 9


def test_regression_gets_a_loss_of_standardised_values() -> None:
    derived = {
        "image_targets": ImageLevelTargets("regression", ("age",)).plain(),
        "value_means": [60.0],
        "value_stds": [10.0],
    }
    loss = fitted_loss(RegressionLoss("mse"), derived)
    assert isinstance(loss, ImageLevelLoss)
    outputs, label = torch.tensor([[80.0]]), torch.tensor([[50.0]])
    assert loss.target(label).tolist() == [[-1.0]]
    assert float(loss(outputs, loss.target(label))) == pytest.approx(9)


@pytest.mark.parametrize("loss", [CrossEntropy(), CrossEntropy(exclusive=False), RegressionLoss()])
def test_image_level_losses_do_not_fit_label_maps(loss: nn.Module) -> None:
    with pytest.raises(ValueError, match="is for image-level .*, not label maps; use loss=dice_ce"):
        fitted_loss(loss, LABEL_MAPS)
