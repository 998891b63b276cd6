"""medconv/features/dicom/series.py: which files are an image, and what is said without the feature."""

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from helpers import dicoms
from helpers.dicoms import array, change, names, one, save, series
from helpers.formats import assert_error_names
from helpers.volumes import image_array
from helpers.volumes import save as save_nifti
from helpers.waiting import PATIENCE_S

from medconv import doors
from medconv.data.case import Case
from medconv.data.io.images import read_array, read_label, stamp
from medconv.data.preprocessing.store import signature
from medconv.features.dicom import series as series_module
from medconv.features.dicom.files import is_dicom
from medconv.inference.inputs import find_cases


def test_each_radiograph_of_a_folder_is_an_image(tmp_path):
    pixels = np.arange(42, dtype=np.uint16).reshape(6, 7)
    bright = dicoms.radiograph(tmp_path / "a.dcm", pixels)
    dark = dicoms.radiograph(
        tmp_path / "b.dcm", pixels, PhotometricInterpretation="MONOCHROME1", BitsStored=12, HighBit=11
    )
    image, grid = read_array(bright)
    np.testing.assert_array_equal(image[..., 0], pixels.T)
    assert grid.spacing_mm == pytest.approx((0.1, 0.2, 1)) and grid.orientation == "LPS"
    np.testing.assert_array_equal(read_array(dark)[0][..., 0], 4095 - pixels.T)  # white is high in both


def test_values_with_a_unit_are_not_turned_round_for_the_screen(tmp_path):
    """A CT may be shown with white for low values; its numbers stay Hounsfield units."""
    pixels = np.arange(42, dtype=np.uint16).reshape(6, 7)
    shown = {"PhotometricInterpretation": "MONOCHROME1", "RescaleSlope": 2, "RescaleIntercept": -1024}
    file = dicoms.radiograph(tmp_path / "a.dcm", pixels, **shown)
    np.testing.assert_array_equal(read_array(file)[0][..., 0], 2 * pixels.T.astype(float) - 1024)
    # US: of no unit, as of a radiograph
    file = dicoms.radiograph(tmp_path / "b.dcm", pixels, **shown, RescaleType="US", BitsStored=12, HighBit=11)
    np.testing.assert_array_equal(read_array(file)[0][..., 0], 2.0 * (4095 - pixels.T) - 1024)


def test_localizers_reports_pictures_and_other_files_are_skipped(tmp_path):
    voxels = array()
    series(tmp_path, voxels)
    for name in ("DICOMDIR", ".hidden", "notes.txt", "Thumbs.db"):
        (tmp_path / name).write_text("not an image")
    scout = array((16, 16, 1))
    save(
        one(scout[..., 0], ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"], SeriesInstanceUID="1.2.3"),
        tmp_path / "scout",
    )
    report = one(scout[..., 0], Modality="SR", SeriesInstanceUID="1.2.4", Rows=None)
    save(report, tmp_path / "report")
    save(colour_picture(), tmp_path / "screen")
    np.testing.assert_array_equal(read_array(tmp_path)[0], voxels)


def colour_picture():
    return one(
        np.zeros((4, 12), np.uint8),
        Columns=4,
        SamplesPerPixel=3,
        PlanarConfiguration=0,
        PhotometricInterpretation="RGB",
    )


def two_series(folder):
    for path in names(folder)[3:]:
        change(path, SeriesInstanceUID="1.2.9", SeriesNumber=4, SeriesDescription="T2", Modality="CT")
    return folder


def only_a_picture(folder):
    for path in folder.iterdir():
        path.unlink()
    save(colour_picture(), folder / "screen.dcm")
    return folder


BAD_FOLDERS = {
    "two series": (
        two_series,
        r"2 series in one folder, expected one: (4 T2 \(CT, 2|3 T1 mprage \(MR, 3) slices, IM.*a file "
        r"selects its series",
    ),
    "only a picture": (
        only_a_picture,
        r"no slice of a volume there, .*1 such as screen\.dcm: a colour image \(RGB\)",
    ),
}


@pytest.mark.parametrize("fault", BAD_FOLDERS)
def test_an_error_names_the_folder_and_its_fault(tmp_path, fault):
    make, message = BAD_FOLDERS[fault]
    folder = series(tmp_path / "series", array())
    assert_error_names(make(folder), message, folder)


def test_a_dicomdir_is_refused(tmp_path):
    (series(tmp_path, array()) / "DICOMDIR").write_bytes(bytes(128) + b"DICM")
    with pytest.raises(
        ValueError, match="DICOMDIR: a list of files, expected an image or a series; pass its folder"
    ):
        read_array(tmp_path / "DICOMDIR")


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    folder = series(tmp_path / "series", array())
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ValueError) as error:
        read_array(folder)
    assert (
        str(error.value) == f"{folder}: reading DICOM needs the package pydicom: pip install 'medconv[dicom]'"
    )


def test_the_stamp_changes_with_any_slice(tmp_path):
    """The stamp of a file is that of its series, so another series in the folder does not change it."""
    folder = series(tmp_path / "a", array())
    path = names(folder)[1]
    of_folder, of_file = stamp(folder), stamp(path)
    os.utime(path, ns=(1, 1))
    assert stamp(folder) != of_folder and signature(Case("a", (folder,)))[0][1:] == stamp(folder)
    assert stamp(path) != of_file
    of_folder, of_file = stamp(folder), stamp(path)
    dicoms.radiograph(folder / "other.dcm", np.zeros((4, 4), np.uint8))
    assert stamp(folder) != of_folder and stamp(path) == of_file
    next(p for p in folder.iterdir() if p not in (path, folder / "other.dcm")).unlink()
    assert stamp(path) != of_file


def radiographs(folder, count):
    """Files of one series each, in a folder that was changed long ago."""
    pixels = np.zeros((4, 4), np.uint8)
    paths = [
        dicoms.radiograph(folder / f"{i}.dcm", pixels, SeriesInstanceUID=f"1.2.{i}") for i in range(count)
    ]
    os.utime(folder, (1e9, 1e9))
    return paths


@pytest.fixture
def calls(monkeypatch):
    """How often a folder was listed, and a header was read."""
    counted = Counter()

    def counting(name):
        function = getattr(series_module, name)

        def call(path):
            counted[name] += 1
            return function(path)

        return call

    for name in ("list_files", "frames_of"):
        monkeypatch.setattr(series_module, name, counting(name))
    return counted


def test_a_folder_of_many_radiographs_is_not_examined_for_each_of_them(tmp_path, calls):
    paths = radiographs(tmp_path, 6)
    stamps = [stamp(path) for path in paths]
    for path in paths:
        read_array(path)
    assert calls == {"list_files": 1, "frames_of": 6} and len({*map(tuple, stamps)}) == 6
    dicoms.radiograph(paths[2], np.ones((5, 5), np.uint8), SeriesInstanceUID="1.2.2")  # in place
    os.utime(tmp_path, (1e9, 1e9))
    assert stamp(paths[2]) != stamps[2] and read_array(paths[2])[0].shape[:2] == (5, 5)
    assert [stamp(path) for path in paths[3:]] == stamps[3:]


def test_threads_read_the_headers_of_a_folder_once(tmp_path, calls, monkeypatch):
    paths, listing, together = (
        radiographs(tmp_path, 6),
        series_module.list_files,
        Barrier(6, timeout=PATIENCE_S),
    )

    def listed(folder):
        together.wait()
        return listing(folder)

    monkeypatch.setattr(series_module, "list_files", listed)
    with ThreadPoolExecutor(6) as threads:
        assert len(list(threads.map(stamp, paths))) == 6
    assert calls["frames_of"] == 6


def test_a_folder_of_other_files_is_not_dicom(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert not is_dicom(tmp_path)
    with pytest.raises(ValueError, match=r"a folder without a DICOM file, expected an image or a series"):
        read_array(tmp_path)


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
