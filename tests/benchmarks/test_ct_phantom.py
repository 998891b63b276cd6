"""scripts/benchmarks/ct_phantom.py: the made CTs hold what a plan has to keep."""

import numpy as np

from benchmarks import ct_phantom

SHAPE = (160, 160, 96)


def test_a_ct_has_a_large_a_thin_and_a_small_structure():
    image, label = ct_phantom.drawn(0, SHAPE)
    again, _ = ct_phantom.drawn(0, SHAPE)
    assert image.shape == label.shape == SHAPE and image.dtype == np.int16
    assert np.array_equal(image, again)
    voxels = np.bincount(label.ravel(), minlength=4)
    assert (voxels > 0).all() and voxels[1] > 10 * voxels[2]
    across = np.pi / 4 * ct_phantom.VESSEL_MM**2 / (0.8 * 0.8)  # voxels of the tube in a slice
    per_slice = (label == 2).sum((0, 1))
    assert abs(np.median(per_slice) - across) < 0.2 * across
