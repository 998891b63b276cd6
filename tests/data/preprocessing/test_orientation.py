"""medconv/data/preprocessing/orientation.py: axes turned or as stored, and back."""

from itertools import permutations

import nibabel as nib
import numpy as np
import pytest

from medconv.data.case import Grid
from medconv.data.preprocessing.orientation import canonical_spacing, from_canonical, to_canonical


@pytest.mark.parametrize("axes", ["".join(codes) for codes in permutations("LPS")] + ["RAI", "SAR"])
@pytest.mark.parametrize("reorient", [True, False])
def test_turned_axes_come_back(axes: str, reorient: bool) -> None:
    shape = (2, 3, 4)
    volume = np.arange(24).reshape(shape)
    affine = nib.orientations.inv_ornt_aff(nib.orientations.axcodes2ornt(axes), shape) * [[2.0, 3, 4, 1]]
    grid = Grid.of(shape, affine)
    turned, spacing = to_canonical(volume[None], grid, reorient)
    np.testing.assert_array_equal(from_canonical(turned[0], grid, reorient), volume)
    image = nib.Nifti1Image(volume.astype(np.int16), affine)
    expected = nib.as_closest_canonical(image) if reorient else image
    np.testing.assert_array_equal(turned[0], np.asarray(expected.dataobj))
    assert spacing == canonical_spacing(grid, reorient) == pytest.approx(expected.header.get_zooms())
