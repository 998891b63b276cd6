"""medconv/data/preprocessing/entry.py: image, label and positions of the foreground."""

from pathlib import Path

import numpy as np
from helpers.volumes import SHAPE, image_array, label_array, preprocessing_config, save, tiny, write_nnunet

from medconv.data.datasets.nnunet import nnunet
from medconv.data.preprocessing.entry import prepare_case


def test_a_prepared_case_has_image_label_and_foreground(tmp_path: Path) -> None:
    (case,) = nnunet(write_nnunet(tmp_path, 1)).cases
    entry = prepare_case(case, preprocessing_config(channels=2), 3)
    np.testing.assert_array_equal(entry.image, [image_array(0), image_array(0) + 100])
    assert entry.image.dtype == np.float32 and entry.label.dtype == np.uint8
    np.testing.assert_array_equal(entry.label, label_array(0))
    assert entry.foreground.dtype == np.int32
    assert entry.foreground.shape == (np.count_nonzero(label_array(0)), 4)  # class and position
    for value, *where in entry.foreground:
        assert label_array(0)[tuple(where)] == value
    assert len(np.unique(entry.foreground, axis=0)) == len(entry.foreground)


def test_foreground_positions_are_spread_over_a_large_class(tmp_path: Path) -> None:
    (case,) = tiny(tmp_path, 1).cases
    label = np.ones((30, 30, 30), np.uint8)
    label[0, 0, :3] = 2
    save(case.files[0], image_array(0, (30, 30, 30)))
    save(case.files[1], label)
    foreground = prepare_case(case, preprocessing_config(), 3).foreground
    big, small = foreground[foreground[:, 0] == 1], foreground[foreground[:, 0] == 2]
    assert len(big) == 5_000 and len(small) == 3
    assert big[:, 1].min() == 0 and big[:, 1].max() > 25 and abs(big[:, 1].mean() - 14.5) < 3


def test_a_case_without_foreground_has_no_positions(tmp_path: Path) -> None:
    dataset = tiny(tmp_path / "data", 1)
    save(dataset.cases[0].files[-1], np.zeros(SHAPE, np.uint8))
    entry = prepare_case(dataset.cases[0], preprocessing_config(), 3)
    assert entry.foreground.shape == (0, 4)
