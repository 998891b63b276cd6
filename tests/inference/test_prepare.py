"""An image is checked against what the networks were trained on; more of it in `test_predictor.py`."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import loaded_models
from torch import nn

from medconv.inference.prepare import from_array, is_plausible, prepare


def test_an_image_has_one_array_for_each_preprocessing():
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    voxels = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
    image = from_array(voxels, 3, spacing_mm=model.preprocessing.spacing_mm)
    case_input = prepare(image, [model, model], [model.preprocessing])
    (array,) = case_input.arrays
    assert array.shape == (1, 4, 5, 6)
    assert case_input.crops[0].grid == image.grid
    assert case_input.warning is None


def test_a_constant_image_causes_a_warning():
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    image = from_array(np.full((4, 5, 6), 7.0), 3, spacing_mm=model.preprocessing.spacing_mm)
    assert prepare(image, [model], [model.preprocessing]).warning == "a channel is constant"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 4, 5, 6), "trained on 1 channel .*, found 2"),
        (
            (4, 5, 1),
            r"the network is 3D, the image has shape \(4, 5, 1\); expected several slices along each",
        ),
        (
            (1, 5, 6),
            r"the network is 3D, the image has shape \(1, 5, 6\); expected several slices along each",
        ),
        (
            (4, 1, 6),
            r"the network is 3D, the image has shape \(4, 1, 6\); expected several slices along each",
        ),
    ],
)
def test_images_of_another_kind_are_refused(shape, message):
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    image = from_array(np.ones(shape, np.float32), 3, spacing_mm=(1, 1, 1))
    with pytest.raises(ValueError, match=f"^the array: .*{message}"):
        prepare(image, [model], [model.preprocessing])


def test_voxels_that_are_not_finite_are_refused():
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    image = from_array(np.full((4, 5, 6), np.nan, np.float32), 3, spacing_mm=(1, 1, 1))
    with pytest.raises(ValueError, match="NaN or infinite"):
        prepare(image, [model], [model.preprocessing])


RANGES = ((0.5, 1.0), (0.5, 1.0), (2.0, 5.0))


@pytest.mark.parametrize("factor", [100, 0.001])
def test_a_header_far_from_training_is_refused_before_resampling(factor):
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1), spacing_range_mm=RANGES)
    image = from_array(np.ones((400, 400, 20), np.float32), 3, spacing_mm=[factor * mm for mm in (1, 1, 5)])
    actual = f"{factor:g} x {factor:g} x {5 * factor:g}"
    with pytest.raises(
        ValueError,
        match=rf"400 x 400 x 20 voxels of {actual} mm .*, but of 0\.5 to 1 x 0\.5 to 1 x 2 to 5 mm "
        "in training; correct the header, or state the spacing by source_spacing_mm",
    ):
        prepare(image, [model], [model.preprocessing])


def test_a_spacing_that_was_stated_and_unusual_headers_are_used():
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1), spacing_range_mm=RANGES)
    image = from_array(np.ones((4, 5, 6), np.float32), 3, spacing_mm=(1, 1, 20))
    assert "far from that of training" in str(prepare(image, [model], [model.preprocessing]).warning)
    tiny = from_array(np.ones((40, 50, 60), np.float32), 3, spacing_mm=(0.1, 0.1, 0.1))
    stated = replace(tiny, case=replace(tiny.case, source_spacing_mm=(0.1, 0.1, 0.1)))
    assert prepare(stated, [model], [model.preprocessing]).arrays[0].shape == (1, 4, 5, 6)


@pytest.mark.parametrize(("times", "plausible"), [(3.9, True), (4.1, False)])
def test_voxels_may_be_up_to_four_times_as_long_along_each_axis(times, plausible):
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1), spacing_range_mm=RANGES)
    lowest, highest = zip(*RANGES, strict=True)
    assert is_plausible([mm * times for mm in highest], model) == plausible
    assert is_plausible([mm / times for mm in lowest], model) == plausible
