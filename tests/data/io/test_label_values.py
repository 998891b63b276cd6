"""medconv/data/io/label_values.py: what 255 means is decided for all masks of a dataset, not for each file."""

import numpy as np
import pytest
from PIL import Image

from medconv.data.case_files import label_of
from medconv.data.datasets.folder import folder
from medconv.data.io.label_values import relabel_of
from medconv.data.preprocessing.check import check


def write_mask(path, *values):
    """One column of each value beside one of 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = np.uint16 if max(values) > 255 else np.uint8
    pixels = np.repeat(np.array([[0, *values]], dtype), 6, axis=0)
    Image.fromarray(pixels).save(path)
    return path


def write_dataset(root, *values):
    """A case per value, whose mask holds 0 and this one."""
    for number, value in enumerate(values):
        write_mask(root / f"images/c{number:02}.png", 10 + number)
        write_mask(root / f"masks/c{number:02}.png", value)
    return str(root / "images"), str(root / "masks")


def test_0_and_255_in_all_masks_are_one_class(tmp_path):
    for names, value in ((None, 255), (["skin", "mole"], 255), (None, 65535)):
        dataset = folder(*write_dataset(tmp_path, value, 0, value), names)
        assert len(dataset.class_names) == 2
        labels = [label_of(case)[0] for case in dataset.cases]
        assert [np.unique(label).tolist() for label in labels] == [[0, 1], [0], [0, 1]]


def test_two_such_values_are_refused_with_two_files(tmp_path):
    paths = write_dataset(tmp_path, 128, 128, 255)
    for names in (None, ["background", "tumour"]):
        expected = (
            r"masks/c00\.png holds 0, 128, .*masks/c02\.png holds 0, 255: .*expected one such value in all"
        )
        with pytest.raises(ValueError, match=expected):
            folder(*paths, names)
    with pytest.raises(ValueError, match=r"c00\.png: label values \[128\] are not declared, expected 0 to 2"):
        check(folder(*paths, ["background", "benign", "malignant"]), 1)


def test_one_such_value_for_several_classes_is_refused_once(tmp_path):
    paths = write_dataset(tmp_path, 255, 0, 255)
    with pytest.raises(ValueError, match=r"c00\.png and the other masks hold 0, 255: .* class_names names 2"):
        folder(*paths, ["background", "benign", "malignant"])
    assert folder(*write_dataset(tmp_path, 2, 0, 255), ["background", "a", "b"]).cases[2].relabel is None


def test_a_mask_after_the_first_is_checked_when_it_is_read(tmp_path):
    dataset = folder(*write_dataset(tmp_path, *[255] * 20, 128))
    with pytest.raises(ValueError, match=r"c20\.png: label values \[128\] are not declared, expected 0, 255"):
        check(dataset, 1)


def test_a_file_that_holds_one_class_of_many_keeps_its_value(tmp_path):
    names = ["background", *(f"class{value}" for value in range(1, 106))]
    dataset = folder(*write_dataset(tmp_path, 105, 105), names)
    assert np.unique(label_of(dataset.cases[0])[0]).tolist() == [0, 105]


def test_volumes_and_low_values_stay(tmp_path):
    assert relabel_of([None, tmp_path / "a.nii.gz"]) is None
    assert relabel_of([write_mask(tmp_path / "a.png", 99)]) is None
    assert relabel_of([write_mask(tmp_path / "a.png", 1, 2, 255)]) is None
    damaged = tmp_path / "b.png"
    damaged.write_text("no picture")
    assert relabel_of([damaged, write_mask(tmp_path / "c.png", 200)]) == ((0, 0), (200, 1))
