"""The largest difference between the logits of an exported model and those of its checkpoint."""

import math

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import loaded_models
from torch import Tensor, nn

from medconv.features.export.graph import Captured, Logits
from medconv.features.export.parity import on_case, on_patches
from medconv.features.image_level.regression import RegressionTargets

PATCH = torch.zeros(1, 1, 8, 8, 8)
CAPTURED = Captured(Logits(nn.Identity()), None, PATCH, (2, 2, 2), (True, False, True))


class Shifted(nn.Module):
    """Two channels, the image and its negative, a tenth of each, plus `shift`; records the shapes of its inputs."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.shift = shift
        self.shapes = []

    def forward(self, image: Tensor) -> Tensor:
        self.shapes.append(tuple(image.shape))
        return 0.1 * torch.cat([image, -image], 1) + self.shift


@pytest.mark.parametrize("shift", [0.0, 0.25, -0.5])
def test_patches_give_the_largest_difference(shift):
    """On one patch, on three, and on one that is larger along dynamic axes."""
    exported = Shifted(shift)
    models = [loaded_models.segmentation(network) for network in (Shifted(), exported)]
    assert on_patches(*models, CAPTURED.larger) == pytest.approx(abs(shift), abs=1e-6)
    assert exported.shapes == [(1, 1, 8, 8, 8), (3, 1, 8, 8, 8), (1, 1, 10, 8, 10)]


def test_patches_give_nan_if_a_logit_is_nan():
    models = [loaded_models.segmentation(network) for network in (Shifted(), Shifted(math.nan))]
    assert math.isnan(on_patches(*models, CAPTURED.larger))


def test_differences_are_relative_to_large_logits():
    """A network of 256 channels has logits of 10; its own rounding is near 1e-4 of 1."""

    class Large(Shifted):
        def forward(self, image: Tensor) -> Tensor:
            return image.new_full((len(image), 2, *image.shape[2:]), 10 + self.shift)

    models = [loaded_models.segmentation(network) for network in (Large(), Large(0.01))]
    assert on_patches(*models, CAPTURED.larger) == pytest.approx(0.001, rel=1e-3)


def test_differences_of_a_regression_are_relative_to_its_largest_number():
    class Number(nn.Module):
        def __init__(self, number: float) -> None:
            super().__init__()
            self.number = number

        def forward(self, image: Tensor) -> Tensor:
            return image.new_full((len(image), 1), self.number)

    targets = RegressionTargets(("age",))
    models = [loaded_models.image_level(Number(number), targets) for number in (1000.0, 1001.0)]
    captured = Captured(Logits(nn.Identity()), None, torch.zeros(1, 1, 8, 8), (1, 1), (False, False))
    assert on_patches(*models, captured.larger) == pytest.approx(1e-3)


def test_a_case_gives_the_difference_after_preprocessing_and_its_shape(tmp_path):
    path = tmp_path / "a.nii.gz"
    nib.save(nib.Nifti1Image(np.ones((9, 10, 12), np.float32), np.eye(4)), path)
    models = [loaded_models.segmentation(network) for network in (Shifted(), Shifted(0.25))]
    difference, shape = on_case(*models, path)
    assert difference == pytest.approx(0.25, abs=1e-5) and shape == (9, 10, 12)
