"""medconv/features/raters/calibration.py: against slow loops and torchmetrics; perfect and overconfident predictions."""

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from medconv.features.raters.calibration import brier, calibration_error


def test_of_hard_references_it_is_that_of_torchmetrics():
    rng = np.random.default_rng(0)
    predicted = rng.random(5000)
    reference = (rng.random(5000) < predicted**2).astype(float)
    expected = binary_calibration_error(torch.tensor(predicted), torch.tensor(reference).long(), 15)
    assert calibration_error(predicted, reference) == pytest.approx(float(expected), abs=1e-6)


def test_equals_a_loop_over_bins():
    rng = np.random.default_rng(1)
    predicted, reference = rng.random((2, 7, 6, 5)).astype(np.float32)
    predicted[0, 0, 0] = 1.0
    expected = 0.0
    for number in range(15):
        is_in_bin = (predicted >= number / 15) & (predicted < (number + 1) / 15 + (number == 14))
        gap = predicted[is_in_bin].mean(dtype=float) - reference[is_in_bin].mean(dtype=float)
        expected += is_in_bin.mean() * abs(gap)
    assert calibration_error(predicted, reference) == pytest.approx(expected, abs=1e-6)
    assert brier(predicted, reference) == pytest.approx(((predicted - reference) ** 2).mean(), rel=1e-5)


def test_the_mean_of_the_raters_is_perfect_and_one_of_them_is_not():
    mean = np.array([0.0, 0.5, 0.5, 1.0])
    one_rater = np.array([0.0, 1.0, 1.0, 1.0])
    assert brier(mean, mean) == calibration_error(mean, mean) == 0
    assert brier(one_rater, mean) == 0.125
    assert calibration_error(one_rater, mean) == 0.25


def test_a_probability_of_1_is_in_the_last_bin():
    """Two voxels, both in the last bin: their mean prediction is 0.975, their mean reference 0.5."""
    assert calibration_error(np.array([0.95, 1.0]), np.array([1.0, 0.0])) == pytest.approx(0.475)
