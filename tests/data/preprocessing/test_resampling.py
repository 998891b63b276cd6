"""medconv/data/preprocessing/resampling.py: compared with scipy's zoom."""

import numpy as np
import pytest
from scipy import ndimage

from medconv.data.preprocessing.resampling import (
    LINEAR,
    nearest,
    nearest_axis,
    zoom,
    zoom_label,
    zoom_within_range,
)

SHAPES = [
    ((9, 11, 8), (13, 7, 8)),
    ((20, 5, 30), (11, 9, 47)),
    ((1, 6, 7), (3, 5, 7)),
    ((40, 3, 4), (7, 3, 4)),
    ((17, 12), (12, 31)),
]


def scipy_zoom(volume, shape, order):
    factors = [new / old for new, old in zip(shape, volume.shape, strict=True)]
    return ndimage.zoom(volume.astype(np.float32), factors, order=order, mode="nearest", grid_mode=True)


@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_resampled_probabilities_equal_those_of_scipy_and_stay_probabilities(before, after):
    volume = np.random.default_rng(0).random(before, np.float32)
    resampled = zoom(volume, after, order=LINEAR)
    np.testing.assert_allclose(resampled, scipy_zoom(volume, after, 1), atol=1e-6)
    assert volume.min() - 1e-6 <= resampled.min() and resampled.max() <= volume.max() + 1e-6


@pytest.mark.parametrize(("before", "after"), SHAPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_resampled_image_equals_that_of_scipy(before, after, order):
    volume = np.random.default_rng(0).normal(100, 30, before).astype(np.float32, order=order)
    image = zoom(volume, after)
    assert image.dtype == np.float32
    np.testing.assert_allclose(image, scipy_zoom(volume, after, 3), atol=1e-4)


@pytest.mark.parametrize(("before", "after"), SHAPES)
@pytest.mark.parametrize("classes", [2, 5])
def test_a_resampled_label_is_the_class_with_the_largest_weight_in_scipy(before, after, classes):
    """Classes share most voxels of noise, and few voxels of regions."""
    rng = np.random.default_rng(1)
    regions = (ndimage.gaussian_filter(rng.normal(0, 1, before), 2) * 20).clip(0, classes - 1)
    for label in (rng.integers(0, classes, before), regions, 3 * regions, np.zeros(before)):
        weights = np.stack([scipy_zoom(label.astype(int) == value, after, 1) for value in range(3 * classes)])
        resampled = zoom_label(label.astype(np.int16), after)
        assert resampled.dtype == np.int16
        np.testing.assert_array_equal(resampled, weights.argmax(0))


def test_the_lower_of_two_equal_classes_wins():
    assert zoom_label(np.array([[0, 0, 1, 1, 2, 2, 0, 2]], np.int16), (1, 4)).tolist() == [[0, 1, 2, 0]]
    assert zoom_label(np.array([[2, 1, 1, 0, 0, 2]], np.int16), (1, 3)).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_a_smoothed_image_equals_a_gaussian_and_scipys_zoom(before, after):
    volume = np.random.default_rng(0).normal(100, 30, before).astype(np.float32)
    sigma = [max(0, (old / new - 1) / 2) for old, new in zip(before, after, strict=True)]
    smooth = ndimage.gaussian_filter(volume, sigma, mode="nearest")
    np.testing.assert_allclose(zoom(volume, after, smooths=True), scipy_zoom(smooth, after, 3), atol=1e-3)


def test_a_volume_that_keeps_its_shape_is_not_changed():
    volume = np.random.default_rng(0).normal(0, 1, (4, 5, 6)).astype(np.float32)
    np.testing.assert_array_equal(zoom(volume, volume.shape), volume)


@pytest.mark.parametrize(("n", "new"), [(5, 5), (4, 7), (9, 4), (6, 3), (1, 4), (3, 1)])
def test_the_nearest_slices_are_those_of_scipy(n, new):
    places = n / new * (np.arange(new) + 0.5) - 0.5
    expected = ndimage.map_coordinates(np.arange(n), places[None], order=0, mode="nearest")
    np.testing.assert_array_equal(nearest(n, new), expected)


@pytest.mark.parametrize(
    ("spacing", "target", "expected"),
    [
        ((1, 1, 3.1), (1, 1, 1), 2),
        ((1, 1, 1), (4, 1, 1), 0),
        ((5, 1, 1), (1, 1, 4), 0),  # the first of the two decides
        ((1, 1, 3), (1, 1, 3), None),
        ((0.24, 1.25, 1.25), (1, 1, 4), None),
        ((0.24, 1.25, 1.2500001), (1, 1, 1), None),  # equal but for rounding
    ],
)
def test_thick_slices_are_resampled_apart(spacing, target, expected):
    assert nearest_axis(spacing, target) == expected


@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_values_stay_within_the_range_of_their_slice(axis):
    rng, shape = np.random.default_rng(0), (7, 9, 11)
    volume = (rng.random((6, 5, 7)) > 0.5).astype(np.float32) * rng.random((6, 1, 1)).astype(np.float32)
    if axis is None:
        expected = zoom(volume, shape).clip(volume.min(), volume.max())
    else:
        slices = np.moveaxis(volume, axis, 0)
        in_plane = tuple(n for a, n in enumerate(shape) if a != axis)
        resized = np.stack([zoom(plane, in_plane).clip(plane.min(), plane.max()) for plane in slices])
        expected = np.moveaxis(resized[nearest(len(slices), shape[axis])], 0, axis)
    np.testing.assert_allclose(zoom_within_range(volume, shape, axis), expected, atol=1e-6)
    assert zoom(volume, shape).max() > volume.max()
