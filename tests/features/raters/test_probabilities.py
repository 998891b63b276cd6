"""medconv/features/raters/probabilities.py: channels, range and sum of files of probabilities."""

import numpy as np
import pytest
from helpers.volumes import save

from medconv.features.raters.probabilities import read_probabilities


def test_with_or_without_the_background_and_of_one_class_without_a_fourth_axis(tmp_path):
    drawn = np.random.default_rng(0).random((4, 5, 6, 3)).astype(np.float32)
    drawn /= drawn.sum(-1, keepdims=True)
    with_background = read_probabilities(save(tmp_path / "all.nii.gz", drawn), 3)[0]
    without = read_probabilities(save(tmp_path / "some.nii.gz", drawn[..., 1:]), 3)[0]
    np.testing.assert_allclose(with_background, without, atol=1e-6)
    np.testing.assert_allclose(without, np.moveaxis(drawn[..., 1:], -1, 0), atol=1e-6)
    assert read_probabilities(save(tmp_path / "one.nii.gz", drawn[..., 1]), 2)[0].shape == (1, 4, 5, 6)


def test_rounding_is_mended_and_the_background_keeps_no_less_than_nothing(tmp_path):
    almost = np.zeros((2, 2, 2, 2), np.float32)
    almost[0] = [1.0005, -0.0005]
    almost[1] = [0.5004, 0.5004]
    read, _ = read_probabilities(save(tmp_path / "almost.nii.gz", almost), 3)
    assert read.min() == 0 and read.sum(0).max() <= 1 + 1e-6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([255.0, 0.0], r"a probability must lie between 0 and 1, found 255 at voxel \(0, 0, 0\)"),
        ([np.nan, 0.0], "a probability must lie between 0 and 1, found nan"),
        ([0.8, 0.7], "the sum of all classes must lie between 0 and 1, found 1.5"),
        (
            [0.1],
            "expected probabilities in 2 channels, one for each class, or 3 with the background, found 1",
        ),
    ],
)
def test_other_values_are_refused(tmp_path, values, message):
    path = save(tmp_path / "case.nii.gz", np.full((2, 2, 2, len(values)), values, np.float32))
    with pytest.raises(ValueError, match=f"case.nii.gz: {message}"):
        read_probabilities(path, 3)
