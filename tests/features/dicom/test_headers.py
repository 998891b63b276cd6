"""medconv/features/dicom/headers.py: frames of enhanced files, and headers that cannot be used."""

import numpy as np
import pytest
from helpers import dicoms
from helpers.dicoms import array, change_one, names, one, save, series
from helpers.formats import assert_error_names

from medconv.data.io.images import read_array


@pytest.mark.parametrize("b_values", [(0,), (0, 800)])
def test_an_enhanced_file_may_have_its_frames_in_any_order(tmp_path, b_values):
    voxels = array()
    image, grid = read_array(dicoms.enhanced(tmp_path / "all.dcm", voxels, [3, 0, 4, 2, 1], b_values))
    volumes = np.stack([voxels * np.arange(1.0, 6.0) + n for n in range(len(b_values))], -1)
    np.testing.assert_array_equal(image, volumes[..., 0] if len(b_values) == 1 else volumes)
    np.testing.assert_allclose(grid.matrix, dicoms.affine(), atol=1e-6)


def text(folder):
    path = names(folder)[1]
    path.write_text("This is not an image.\n" * 50)
    return path


def cine(folder):
    for path in folder.iterdir():
        path.unlink()
    return save(
        one(np.zeros((3, 6, 7), np.uint8), NumberOfFrames=3, ImagePositionPatient=[0, 0, 0]),
        folder / "cine.dcm",
    )


BAD_HEADERS = {
    "text": (text, r"not a DICOM file \(no DICM after 128 bytes\); expected only slices"),
    "slope of 0": (lambda f: change_one(f, RescaleSlope=0), "RescaleSlope is 0, so all values are equal"),
    "cine": (cine, r"3 frames, of which 0 have a position in the patient; expected slices, not a cine"),
    "mosaic": (
        lambda f: change_one(f, ImageType=["ORIGINAL", "PRIMARY", "M", "MOSAIC"]),
        r"\(a Siemens mosaic, .* with dcm2niix\)",
    ),
}


@pytest.mark.parametrize("fault", BAD_HEADERS)
def test_an_error_names_the_file_and_its_fault(tmp_path, fault):
    make, message = BAD_HEADERS[fault]
    folder = series(tmp_path / "series", array())
    assert_error_names(make(folder), message, folder)
