"""medconv/data/preprocessing/examine.py: what is measured of one case."""

from itertools import groupby

import numpy as np
import pytest
from helpers.volumes import image_array, save, tiny

from medconv.data.preprocessing.examine import examine, thickness_of


def test_report_keeps_a_sample_and_not_the_volume(tmp_path):
    """Reports of all cases are in memory at once."""
    dataset = tiny(tmp_path, 1)
    image, label = dataset.cases[0].files
    save(image, image_array(0, (40, 40, 40)))
    save(label, np.ones((40, 40, 40), np.uint8))
    sample = examine(dataset.cases[0], dataset).intensities
    assert sample is not None and sample.base is None
    assert 5_000 <= sample.size < 10_000


def test_thickness_is_the_mean_length_of_runs():
    """Against a count voxel by voxel."""
    label = np.random.default_rng(0).integers(0, 4, (7, 6, 5)).astype(np.uint8)
    label[label == 3] = 9  # a value to ignore
    spacing_mm = (1.0, 0.5, 3.0)
    measured = thickness_of(label, np.bincount(label.ravel())[:3], spacing_mm)
    for value in range(3):
        for axis in range(3):
            runs = [
                len(list(run))
                for line in np.moveaxis(label, axis, -1).reshape(-1, label.shape[axis])
                for key, run in groupby(line)
                if key == value
            ]
            assert measured[value, axis] == pytest.approx(spacing_mm[axis] * np.mean(runs))


def test_a_ball_is_two_thirds_of_its_diameter_thick_and_small_ones_are_not_hidden():
    radius = 12
    axes = np.ogrid[-16:17, -16:17, -16:17]
    ball = (sum(axis**2 for axis in axes) < radius**2).astype(np.uint8)
    counts = np.bincount(ball.ravel())
    assert thickness_of(ball, counts, (1, 1, 1))[1] == pytest.approx([16, 16, 16], rel=0.05)
    specks = np.concatenate([ball, np.zeros((60, 33, 33), np.uint8)])
    specks[36::4, ::4, ::4] = 1  # single voxels
    assert thickness_of(specks, np.bincount(specks.ravel()), (1, 1, 1))[1].max() < 6
