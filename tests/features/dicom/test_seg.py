"""medconv/features/dicom/seg.py: what highdicom and pydicom read from a written DICOM SEG."""

import numpy as np
import pytest
from helpers import dicoms

from medconv.features.dicom import seg

highdicom = pytest.importorskip("highdicom", reason="the extra `dicomseg`")


def test_segments_follow_the_frames_of_an_enhanced_file(tmp_path):
    source = dicoms.enhanced(tmp_path / "all.dcm", dicoms.array(), [3, 0, 4, 2, 1])
    label = (np.arange(9 * 7 * 5).reshape(9, 7, 5) % 3).astype(np.int16)
    seg.write(tmp_path / "out.dcm", label, source, ("background", "a", "b" * 80))
    segmentation = highdicom.seg.segread(tmp_path / "out.dcm")
    uid = dicoms.pydicom.dcmread(source).SOPInstanceUID
    frames = segmentation.get_pixels_by_source_frame(uid, [1, 2, 3, 4, 5], combine_segments=True)
    np.testing.assert_array_equal(frames.transpose(2, 1, 0), label[:, :, [3, 0, 4, 2, 1]])


def test_class_and_patient_names_keep_their_letters(tmp_path):
    names = {"SpecificCharacterSet": "ISO_IR 100", "PatientName": "Müller^Jörg"}
    source = dicoms.series(tmp_path / "se", dicoms.array(), **names)
    seg.write(tmp_path / "out.dcm", np.ones((9, 7, 5), np.int16), source, ("background", "Läsion", "肝"))
    content = dicoms.pydicom.dcmread(tmp_path / "out.dcm")
    assert [segment.SegmentLabel for segment in content.SegmentSequence] == ["Läsion", "肝"]
    assert content.PatientName == "Müller^Jörg"


def test_a_source_may_lack_what_was_removed_from_it(tmp_path):
    source = dicoms.series(tmp_path / "se", dicoms.array())
    for path in source.iterdir():
        content = dicoms.pydicom.dcmread(path)
        for keyword in ("PatientName", "PatientBirthDate", "StudyID", "StudyDate", "AccessionNumber"):
            if keyword in content:
                delattr(content, keyword)
        content.save_as(path)
    seg.write(tmp_path / "out.dcm", np.ones((9, 7, 5), np.int16), source, ("background", "a"))
    assert dicoms.pydicom.dcmread(tmp_path / "out.dcm").PatientBirthDate == ""


def test_segments_have_codes_of_the_standard(tmp_path):
    codes = dicoms.pydicom.sr.codedict.codes
    source = dicoms.series(tmp_path / "se", dicoms.array())
    seg.write(tmp_path / "out.dcm", np.ones((9, 7, 5), np.int16), source, ("background", "kidney_left", "x"))
    segmentation = highdicom.seg.segread(tmp_path / "out.dcm")
    kidney, private = (segmentation.get_segment_description(number) for number in (1, 2))
    assert kidney.segmented_property_category == codes.cid7150.AnatomicalStructure
    assert kidney.segmented_property_type == codes.SCT.Kidney
    side = kidney.SegmentedPropertyTypeCodeSequence[0].SegmentedPropertyTypeModifierCodeSequence[0]
    assert side.CodeMeaning == "Left"
    assert private.segmented_property_type.scheme_designator == "99MEDCONV"


def test_simpleitk_reads_the_same_voxels(tmp_path):
    itk = pytest.importorskip("SimpleITK", reason="the extra `itk`")
    source = dicoms.series(tmp_path / "se", dicoms.array((16, 8, 5)))
    label = np.zeros((16, 8, 5), np.int16)
    label[2:7, 1:5, 1:4] = 1
    seg.write(tmp_path / "out.dcm", label, source, ("background", "liver"))
    image = itk.ReadImage(str(tmp_path / "out.dcm"))
    voxels = itk.GetArrayFromImage(image).transpose(2, 1, 0)
    np.testing.assert_array_equal(voxels > 0, label[:, :, 1:4] > 0)
    spacing = image.GetSpacing()
    np.testing.assert_allclose(spacing, (*dicoms.SPACING, dicoms.STEP), atol=1e-5)
