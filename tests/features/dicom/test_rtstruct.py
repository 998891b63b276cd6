"""medconv/features/dicom/rtstruct.py: written contours as other programs find them, and filled again."""

from pathlib import Path

import numpy as np
import pytest
from helpers import dicoms
from helpers.dicoms import AXIAL, OBLIQUE, array, series
from matplotlib.path import Path as Polygon
from scipy.ndimage import gaussian_filter

from medconv.data.io.images import read_label
from medconv.features.dicom import rtstruct

NAMES = ["background", "liver", "kidney_left"]
SHAPE = (24, 19, 5)


def blobs():
    """Two classes with holes, islands in holes, voxels that touch at a corner, and voxels at the border."""
    noise = gaussian_filter(np.random.default_rng(0).normal(size=SHAPE), (1, 1, 0.5))
    return np.digitize(noise, [0.02, 0.2]).astype(np.int16)


def written(folder, label, image, names=NAMES):
    rtstruct.write(folder / "rs.dcm", label, image, names)
    return dicoms.pydicom.dcmread(folder / "rs.dcm")


@pytest.mark.parametrize("orientation", [AXIAL, OBLIQUE], ids=["axial", "oblique"])
def test_filled_contours_are_the_label_map(tmp_path, orientation):
    image = series(tmp_path / "image", array(SHAPE), orientation)
    written(tmp_path, blobs(), image)
    label, _ = read_label(Path(f"{tmp_path / 'rs.dcm'}#roi=liver;kidney_left"), image)
    np.testing.assert_array_equal(label, blobs())


@pytest.mark.parametrize("orientation", [AXIAL, OBLIQUE], ids=["axial", "oblique"])
def test_other_programs_find_the_structure(tmp_path, orientation):
    """SimpleITK says where the slices are, matplotlib which voxels are inside."""
    itk = pytest.importorskip("SimpleITK", reason="the extra `itk`")
    x, y, z = np.indices(SHAPE)
    ring = (abs(np.hypot(x - 11, y - 9) - 5.5) < 2) & (z > 1)
    image = series(tmp_path / "image", array(SHAPE), orientation)
    content = written(tmp_path, ring.astype(np.int16), image)
    assert len(content.ROIContourSequence[0].ContourSequence) == 3  # one on a slice, holes are keyholes
    files = itk.ImageSeriesReader.GetGDCMSeriesFileNames(str(image))
    grid = itk.ReadImage(files)
    inside = np.zeros(SHAPE, bool)
    centres = np.argwhere(inside[:, :, 0] == 0)
    for contour in content.ROIContourSequence[0].ContourSequence:
        points = np.reshape(contour.ContourData, (-1, 3)).tolist()
        voxels = np.array([grid.TransformPhysicalPointToContinuousIndex(point) for point in points])
        (reference,) = contour.ContourImageSequence
        source = dicoms.pydicom.dcmread(files[round(voxels[0, 2])])
        assert reference.ReferencedSOPInstanceUID == source.SOPInstanceUID
        filled = Polygon(voxels[:, :2]).contains_points(centres).reshape(SHAPE[:2])
        inside[:, :, round(voxels[0, 2])] ^= filled
    np.testing.assert_array_equal(inside, ring)


def test_a_structure_has_name_code_and_patient(tmp_path):
    names = {"SpecificCharacterSet": "ISO_IR 100", "PatientName": "Müller^Jörg"}
    image = series(tmp_path / "image", array(SHAPE), **names)
    content = written(tmp_path, blobs(), image, ["background", "kidney_left", "肝\\脾" * 40])
    assert [roi.ROIName for roi in content.StructureSetROISequence] == ["kidney_left", ("肝/脾" * 40)[:64]]
    assert content.PatientName == "Müller^Jörg"
    coded, private = content.RTROIObservationsSequence
    (code,) = coded.RTROIIdentificationCodeSequence
    assert (code.CodingSchemeDesignator, code.CodeValue) == ("SCT", "64033007")
    assert code.SegmentedPropertyTypeModifierCodeSequence[0].CodeMeaning == "Left"
    assert "RTROIIdentificationCodeSequence" not in private


def test_a_class_without_voxels_is_a_structure_without_contours(tmp_path):
    content = written(tmp_path, np.zeros(SHAPE, np.int16), series(tmp_path / "image", array(SHAPE)))
    assert [roi.ROIName for roi in content.StructureSetROISequence] == NAMES[1:]
    assert all("ContourSequence" not in contours for contours in content.ROIContourSequence)


def test_contours_name_their_frame_of_an_enhanced_file(tmp_path):
    order = [3, 0, 4, 2, 1]
    image = dicoms.enhanced(tmp_path / "all.dcm", array(SHAPE), order)
    label = np.zeros(SHAPE, np.int16)
    label[3:6, 3:6, 2:4] = 1
    content = written(tmp_path, label, image)
    contours = content.ROIContourSequence[0].ContourSequence
    numbers = [contour.ContourImageSequence[0].ReferencedFrameNumber for contour in contours]
    assert numbers == [4, 1]
