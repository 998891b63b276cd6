"""medconv/features/dicom/seg.py: what highdicom and pydicom read from a written DICOM SEG."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import dicoms

from medconv.features.dicom import seg

highdicom = pytest.importorskip("highdicom", reason="the extra `dicomseg`")


def test_segments_follow_the_frames_of_an_enhanced_file(tmp_path: Path) -> None:
    source = dicoms.enhanced(tmp_path / "all.dcm", dicoms.array(), [3, 0, 4, 2, 1])
    label = (np.arange(9 * 7 * 5).reshape(9, 7, 5) % 3).astype(np.int16)
    seg.write(tmp_path / "out.dcm", label, source, ("background", "a", "b" * 80))
    segmentation = highdicom.seg.segread(tmp_path / "out.dcm")
    uid = dicoms.pydicom.dcmread(source).SOPInstanceUID
    frames = segmentation.get_pixels_by_source_frame(uid, [1, 2, 3, 4, 5], combine_segments=True)
    np.testing.assert_array_equal(frames.transpose(2, 1, 0), label[:, :, [3, 0, 4, 2, 1]])


def test_class_and_patient_names_keep_their_letters(tmp_path: Path) -> None:
    names = {"SpecificCharacterSet": "ISO_IR 100", "PatientName": "Müller^Jörg"}
    source = dicoms.series(tmp_path / "se", dicoms.array(), **names)
    seg.write(tmp_path / "out.dcm", np.ones((9, 7, 5), np.int16), source, ("background", "Läsion", "肝"))
    content = dicoms.pydicom.dcmread(tmp_path / "out.dcm")
    assert [segment.SegmentLabel for segment in content.SegmentSequence] == ["Läsion", "肝"]
    assert content.PatientName == "Müller^Jörg"
