"""medconv/features/dicom/seg_label.py: DICOM SEG as label maps, against the arrays that were written."""

from pathlib import Path

import numpy as np
import pytest
from helpers.dicoms import AXIAL, OBLIQUE, array, series

from medconv.data.case_files import label_of
from medconv.data.datasets.folder import folder
from medconv.data.io.images import label_names, read_label
from medconv.features.dicom import seg

pytest.importorskip("highdicom", reason="the extra `dicomseg`")
NAMES = ["background", "liver", "spleen"]


def labels() -> np.ndarray:
    """No slice at either end has foreground, so the file lacks them."""
    label = np.zeros((9, 7, 5), np.int16)
    label[2:4, 1:5, 1:3] = 1
    label[5:7, 2:6, 2:4] = 2
    return label


@pytest.mark.parametrize("orientation", [AXIAL, OBLIQUE], ids=["axial", "oblique"])
def test_segments_lie_on_the_grid_of_the_image(tmp_path: Path, orientation: tuple[float, ...]) -> None:
    image = series(tmp_path / "image", array(), orientation)
    seg.write(tmp_path / "seg/s.dcm", labels(), image, NAMES)
    for path in (tmp_path / "seg/s.dcm", tmp_path / "seg"):
        label, _ = read_label(path, image)
        np.testing.assert_array_equal(label, labels())
        assert label_names(path) == {1: "liver", 2: "spleen"}


def test_segmentations_of_a_dataset_are_matched_by_name(tmp_path: Path) -> None:
    for case, names in (("a", NAMES), ("b", ["background", "spleen", "liver"])):
        image = series(tmp_path / case / "image", array())
        seg.write(tmp_path / case / "seg.dcm", labels(), image, names)
    dataset = folder(f"{tmp_path}/{{id}}/image", f"{tmp_path}/{{id}}/seg.dcm")
    assert dataset.class_names == ("background", "liver", "spleen")
    first, second = (label_of(case)[0] for case in dataset.cases)
    np.testing.assert_array_equal(first, labels())
    np.testing.assert_array_equal(second, np.where(labels(), 3 - labels(), 0))


def test_a_segmentation_of_another_image_is_refused(tmp_path: Path) -> None:
    image = series(tmp_path / "image", array())
    seg.write(tmp_path / "seg.dcm", labels(), image, NAMES)
    smaller = series(tmp_path / "smaller", array((9, 7, 2)))
    with pytest.raises(ValueError, match=r"seg\.dcm: segments reach beyond .*smaller"):
        read_label(tmp_path / "seg.dcm", smaller)
    turned = series(tmp_path / "turned", array(), OBLIQUE)
    with pytest.raises(ValueError, match=r"seg\.dcm: its voxels are not those of .*turned"):
        read_label(tmp_path / "seg.dcm", turned)
