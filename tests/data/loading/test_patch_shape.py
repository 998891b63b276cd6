"""medconv/data/loading/patch_shape.py: boxes of volumes for patches of two and three axes."""

import numpy as np
import pytest

from medconv.data.loading.patch_shape import PatchShape


@pytest.mark.parametrize(("axis", "box"), [(None, (5, 4)), (0, (1, 5, 4)), (1, (5, 1, 4)), (2, (5, 4, 1))])
def test_a_slice_is_a_box_of_one_voxel(axis: int | None, box: tuple[int, ...]) -> None:
    patch = PatchShape([5, 4], axis)
    assert patch.box == box
    assert patch.box_of([7, 8]) == tuple({5: 7, 4: 8, 1: 1}[voxels] for voxels in box)
    voxels = np.arange(40).reshape(2, *box)
    np.testing.assert_array_equal(patch.without_slice_axis(voxels), np.arange(40).reshape(2, 5, 4))
