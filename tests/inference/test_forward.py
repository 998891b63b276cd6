"""Prepared images through networks: means over flips and members, and outputs that are not finite."""

import math
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import loaded_models
from helpers.members import refused
from torch import nn

from medconv.inference.predictor import Predictor, check_finite


def test_logits_that_are_not_finite_are_an_error(tmp_path):
    broken = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    next(broken.network.parameters()).data.fill_(float("nan"))
    nib.save(nib.Nifti1Image(np.ones((8, 8, 8), np.float32), np.eye(4)), tmp_path / "a.nii.gz")
    with refused(r"the network's logits are not finite \(precision=32-true\)"):
        Predictor([broken])(tmp_path / "a.nii.gz")


def test_a_file_has_the_spacing_that_training_stated_of_its_case(tmp_path, caplog):
    predictor = Predictor(
        [loaded_models.segmentation(nn.Conv3d(1, 2, 1), source_spacing_mm={"site_a": [2, 2, 2]})]
    )
    noise = np.random.default_rng(0).standard_normal((8, 8, 8)).astype(np.float32)
    for name in ("site_a_0000.nii.gz", "site_b_0000.nii.gz"):
        nib.save(nib.Nifti1Image(noise, np.eye(4)), tmp_path / name)
        predictor(tmp_path / name)
    (message,) = caplog.messages
    assert (
        "site_b_0000.nii.gz: its spacing is its header's, but training set source_spacing_mm for some cases"
        in message
    )


class Strides(nn.Conv3d):
    """Notes the strides of its last input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.seen = input.stride()
        return super().forward(input)


def test_windows_of_one_channel_are_channels_last(tmp_path):
    network = Strides(1, 2, 1)
    member = replace(loaded_models.segmentation(network), memory_format=torch.channels_last_3d)
    nib.save(nib.Nifti1Image(np.ones((8, 8, 8), np.float32), np.eye(4)), tmp_path / "a.nii.gz")
    Predictor([member])(tmp_path / "a.nii.gz")
    assert network.seen == (512, 1, 64, 8, 1)


@pytest.mark.parametrize("values", [[3e38, 3e38, 3e38], [3e38, -1e38]])
def test_large_logits_are_finite_even_if_their_sum_is_not(values):
    member = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    check_finite("logits", member, np.zeros(1), torch.tensor(values))
    for bad in (math.inf, -math.inf, math.nan):
        with pytest.raises(ValueError, match="logits are not finite"):
            check_finite("logits", member, np.zeros(1), torch.tensor([*values, bad]))


def test_logits_that_overflow_by_the_image_blame_the_image(tmp_path):
    huge = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    next(huge.network.parameters()).data.fill_(1e10)
    image = np.linspace(-1e30, 1e30, 512, dtype=np.float32).reshape(8, 8, 8)
    nib.save(nib.Nifti1Image(image, np.eye(4)), tmp_path / "a.nii.gz")
    with refused(r"the image has values from -1e\+30 to 1e\+30 after normalisation=none; the network's"):
        Predictor([huge])(tmp_path / "a.nii.gz")
    with pytest.raises(
        ValueError, match=r"^the image has values from -1e\+30 to 0 after normalisation=none;"
    ):
        check_finite("logits", huge, np.array([-1e30, 0]), torch.tensor([math.nan]))
