"""Without the feature, a series is refused by a line that names it; other images are read as before."""

import pytest
from helpers.dicoms import series
from helpers.volumes import image_array
from helpers.volumes import save as save_nifti

from medconv import doors
from medconv.data.io.images import read_array, read_label, stamp
from medconv.inference.inputs import find_cases

IS_MISSING = "DICOM needs the feature medconv/features/dicom, which is not there"


@pytest.fixture
def scan(tmp_path, monkeypatch):
    """A series, in an installation without this feature."""
    folder = tmp_path / "scan"
    series(folder, image_array(0))
    others = tuple(feature for feature in doors.features() if feature.__name__ != "medconv.features.dicom")
    monkeypatch.setattr(doors, "features", lambda: others)
    yield folder


def test_a_series_and_its_files_are_refused(scan):
    for path in (scan, next(scan.iterdir())):
        with pytest.raises(ValueError, match=IS_MISSING):
            read_array(path)
        with pytest.raises(ValueError, match=IS_MISSING):
            stamp(path)


def test_a_folder_to_predict_is_refused(scan):
    with pytest.raises(ValueError, match=rf"source {scan}: no image there .*; {IS_MISSING}"):
        find_cases(scan, 1)


def test_contours_are_refused(scan, tmp_path):
    image = save_nifti(tmp_path / "a.nii.gz", image_array(0))
    with pytest.raises(ValueError, match=rf"rs\.dcm#roi=heart: {IS_MISSING}"):
        read_label(tmp_path / "rs.dcm#roi=heart", image)


def test_other_images_are_read(scan, tmp_path):
    image = save_nifti(tmp_path / "a.nii.gz", image_array(0))
    assert read_array(image)[0].shape == image_array(0).shape
