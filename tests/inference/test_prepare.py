"""An image is checked against what the networks were trained on; more of it in `test_predictor.py`."""

import numpy as np
import pytest
from helpers import loaded_models
from torch import nn

from medconv.inference.images import from_array
from medconv.inference.prepare import prepare


def test_an_image_has_one_array_for_each_preprocessing() -> None:
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    image = from_array(np.ones((4, 5, 6), np.float32), 3, spacing_mm=model.preprocessing.spacing_mm)
    case_input = prepare(image, [model, model], [model.preprocessing])
    (array,) = case_input.arrays
    assert array.shape == (1, 4, 5, 6)
    assert case_input.crop.grid == image.grid
    assert case_input.warning is None


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 4, 5, 6), "trained on 1 channels .*, found 2"),
        ((4, 5, 1), r"the network is 3D, the image has shape \(4, 5, 1\)"),
    ],
)
def test_images_of_another_kind_are_refused(shape: tuple[int, ...], message: str) -> None:
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    image = from_array(np.ones(shape, np.float32), 3, spacing_mm=(1, 1, 1))
    with pytest.raises(ValueError, match=f"^the array: .*{message}"):
        prepare(image, [model], [model.preprocessing])


def test_voxels_that_are_not_finite_are_refused() -> None:
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    image = from_array(np.full((4, 5, 6), np.nan, np.float32), 3, spacing_mm=(1, 1, 1))
    with pytest.raises(ValueError, match="NaN or infinite"):
        prepare(image, [model], [model.preprocessing])
