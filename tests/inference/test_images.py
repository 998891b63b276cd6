"""Images from Python: arrays, nibabel images and files give the same voxels and grid."""

import nibabel as nib
import numpy as np
import pytest

from medconv.data.case import Case
from medconv.inference.prepare import from_array, from_files, from_nibabel

AFFINE = np.array([[0, -1.2, 0, 3], [1.4, 0, 0, 4], [0, 0, 1.7, 5], [0, 0, 0, 1.0]])


def volume(channels=2):
    """(X, Y, Z, channels), as NIfTI has them."""
    return np.random.default_rng(0).normal(size=(4, 5, 6, channels)).astype(np.float32)


def test_files_arrays_and_nibabel_images_are_the_same_image(tmp_path):
    nib.save(nib.Nifti1Image(volume(), AFFINE), tmp_path / "a.nii.gz")
    expected = from_files(Case("a", (tmp_path / "a.nii.gz",)))
    loaded = nib.load(tmp_path / "a.nii.gz")
    channels = [nib.Nifti1Image(volume()[..., index], loaded.affine) for index in range(2)]
    for image in (
        from_array(np.moveaxis(volume(), -1, 0), 3, affine=loaded.affine),
        from_nibabel([loaded]),
        from_nibabel(channels),
    ):
        np.testing.assert_array_equal(image.voxels, expected.voxels)
        assert image.voxels.dtype == np.float32
        assert image.grid == expected.grid
        assert image.is_oriented
    assert from_nibabel([loaded]).case.id == "a"


def test_one_channel_and_2d_images_need_no_axis_for_it():
    assert from_array(volume()[..., 0], 3, spacing_mm=(1, 2, 3)).voxels.shape == (1, 4, 5, 6)
    flat = from_array(volume()[:, :, 0, 0], 2, spacing_mm=(1, 2))
    assert flat.voxels.shape == (1, 4, 5, 1)
    assert flat.grid.spacing_mm == (1, 2, 1)
    assert from_array(volume()[:, :, 0].transpose(2, 0, 1), 2, spacing_mm=(1, 2)).voxels.shape == (2, 4, 5, 1)
    as_in_files = from_array(volume()[:, :, :1, 0], 2, spacing_mm=(1, 2, 3))
    np.testing.assert_array_equal(as_in_files.voxels, flat.voxels)
    assert as_in_files.grid.spacing_mm == (1, 2, 3)


VOLUME = np.zeros((4, 5, 6))


@pytest.mark.parametrize(
    ("array", "arguments", "message"),
    [
        (VOLUME, {}, "^affine or spacing_mm is needed for an array, got neither$"),
        (
            VOLUME,
            {"affine": AFFINE, "spacing_mm": (1, 1, 1)},
            "^affine or spacing_mm is needed .*, got both$",
        ),
        (VOLUME, {"spacing_mm": (1, 1)}, r"^spacing_mm must be 3 positive numbers, got \[1, 1\]$"),
        (VOLUME, {"spacing_mm": (1, 1, 0)}, r"^spacing_mm must be 3 positive numbers, got \[1, 1, 0\]$"),
        (VOLUME, {"affine": np.eye(3)}, r"^affine must have shape \(4, 4\), got \(3, 3\)$"),
        (VOLUME, {"affine": np.zeros((4, 4))}, "^affine is singular"),
        (
            VOLUME[0],
            {"spacing_mm": (1, 1, 1)},
            r"^an array must be \(X, Y, Z\) or \(channels, X, Y, Z\), got shape",
        ),
        (
            VOLUME.astype(complex),
            {"spacing_mm": (1, 1, 1)},
            "^the array: expected voxels that are real numbers, got complex128",
        ),
    ],
)
def test_arrays_that_are_no_images_are_refused(array, arguments, message):
    with pytest.raises(ValueError, match=message):
        from_array(array, 3, **arguments)


def test_channels_on_different_grids_are_refused():
    images = [nib.Nifti1Image(volume(1)[..., 0], affine) for affine in (AFFINE, np.eye(4))]
    with pytest.raises(ValueError, match=r"image 1.*image 2|image 2.*image 1"):
        from_nibabel(images)
