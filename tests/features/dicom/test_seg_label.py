"""medconv/features/dicom/seg_label.py: DICOM SEG as label maps, against the arrays that were written."""

from pathlib import Path

import numpy as np
import pytest
from helpers import dicoms
from helpers.dicoms import AXIAL, OBLIQUE, array, series

from medconv.data.case_files import label_of
from medconv.data.datasets.folder import folder
from medconv.data.io.images import label_names, missing_slices, read_label
from medconv.features.dicom import seg

highdicom = pytest.importorskip("highdicom", reason="the extra `dicomseg`")
NAMES = ["background", "liver", "spleen"]


def labels():
    """No slice at either end has foreground, so the file lacks them."""
    label = np.zeros((9, 7, 5), np.int16)
    label[2:4, 1:5, 1:3] = 1
    label[5:7, 2:6, 2:4] = 2
    return label


@pytest.mark.parametrize("orientation", [AXIAL, OBLIQUE], ids=["axial", "oblique"])
def test_segments_lie_on_the_grid_of_the_image(tmp_path, orientation):
    image = series(tmp_path / "image", array(), orientation)
    seg.write(tmp_path / "seg/s.dcm", labels(), image, NAMES)
    for path in (tmp_path / "seg/s.dcm", tmp_path / "seg"):
        label, _ = read_label(path, image)
        np.testing.assert_array_equal(label, labels())
        assert label_names(path) == {1: "liver", 2: "spleen"}


def test_the_segmentation_of_one_slice_lies_on_it(tmp_path):
    """Its file states another step to the next slice, though there is none."""
    image = series(tmp_path / "image", array((9, 7, 1)), OBLIQUE)
    seg.write(tmp_path / "s.dcm", labels()[:, :, 2:3], image, NAMES)
    label, _ = read_label(tmp_path / "s.dcm", image)
    np.testing.assert_array_equal(label, labels()[:, :, 2:3])


def test_segmentations_of_a_dataset_are_matched_by_name(tmp_path):
    for case, names in (("a", NAMES), ("b", ["background", "spleen", "liver"])):
        image = series(tmp_path / case / "image", array())
        seg.write(tmp_path / case / "seg.dcm", labels(), image, names)
    dataset = folder(f"{tmp_path}/{{id}}/image", f"{tmp_path}/{{id}}/seg.dcm")
    assert dataset.class_names == ("background", "liver", "spleen")
    first, second = (label_of(case)[0] for case in dataset.cases)
    np.testing.assert_array_equal(first, labels())
    np.testing.assert_array_equal(second, np.where(labels(), 3 - labels(), 0))


def test_chosen_segments_may_overlap(tmp_path):
    image = series(tmp_path / "image", array())
    whole = np.where(labels() == 1, 1, 0)
    core = np.zeros_like(whole)
    core[3, 2:6, 2] = 1
    files = [dicoms.pydicom.dcmread(file) for file in dicoms.names(image)]
    highdicom.seg.Segmentation(
        source_images=files,
        pixel_array=np.stack([whole, core, core], axis=-1).transpose(2, 1, 0, 3).astype(np.uint8),
        segmentation_type="BINARY",
        segment_descriptions=[
            seg._segment(highdicom, value, name) for value, name in enumerate(["Liver", "tumor", "vein"], 1)
        ],
        series_instance_uid=highdicom.UID(),
        series_number=1,
        sop_instance_uid=highdicom.UID(),
        instance_number=1,
        manufacturer="maker",
        manufacturer_model_name="model",
        software_versions="1",
        device_serial_number="0",
    ).save_as(tmp_path / "seg.dcm")
    expected = np.where(core, 2, whole)
    label, grid = read_label(Path(f"{tmp_path}/seg.dcm#roi=liver;tumour|tumor"), image)
    np.testing.assert_array_equal(label, expected)
    assert missing_slices(Path(f"{tmp_path}/seg.dcm#roi=liver"), image, grid) == []
    with pytest.raises(ValueError, match=r"seg\.dcm: no structures are 'spleen'; there are 'Liver', 'tumor'"):
        read_label(Path(f"{tmp_path}/seg.dcm#roi=liver;spleen"), image)
    with pytest.raises(ValueError, match=r"seg\.dcm: cannot be read as DICOM SEG of exclusive segments"):
        read_label(tmp_path / "seg.dcm", image)


def test_a_segmentation_of_another_image_is_refused(tmp_path):
    image = series(tmp_path / "image", array())
    seg.write(tmp_path / "seg.dcm", labels(), image, NAMES)
    smaller = series(tmp_path / "smaller", array((9, 7, 2)))
    with pytest.raises(ValueError, match=r"seg\.dcm: segments reach beyond .*smaller"):
        read_label(tmp_path / "seg.dcm", smaller)
    turned = series(tmp_path / "turned", array(), OBLIQUE)
    with pytest.raises(ValueError, match=r"seg\.dcm: its voxels are not those of .*turned"):
        read_label(tmp_path / "seg.dcm", turned)
