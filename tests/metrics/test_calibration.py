"""medconv/metrics/calibration.py: against slow loops and torchmetrics; perfect and overconfident predictions;
temperatures against a grid of them.
"""

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from medconv.metrics.calibration import at_temperature, brier, calibration_error, temperature


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


def drawn(classes=3, cases=4000):
    """Logits, and classes that have their probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(cases, classes, generator=generator, dtype=torch.float64)
    truth = torch.multinomial(logits.softmax(-1), 1, generator=generator)
    return logits, truth[:, 0].numpy()


def test_the_temperature_is_the_factor_of_overconfident_logits():
    logits, truth = drawn()
    overconfident = (3 * logits).softmax(-1).numpy()
    grid = np.linspace(2, 4, 2001)
    cases = np.arange(len(truth))
    losses = [-np.log((3 * logits / t).softmax(-1).numpy()[cases, truth]).mean() for t in grid]
    found = temperature(overconfident, truth)
    assert found == pytest.approx(grid[np.argmin(losses)], abs=1e-3)
    assert found == pytest.approx(3, rel=0.1)
    # Of any shape, as labels of a multilabel case are
    assert temperature(overconfident.reshape(40, 100, 3), truth.reshape(40, 100)) == found


def test_the_temperature_is_1_if_nothing_is_overconfident():
    logits, truth = drawn()
    assert temperature((0.5 * logits).softmax(-1).numpy(), truth) == 1
    all_right = np.array([[0.6, 0.4], [0.3, 0.7]])
    assert temperature(all_right, np.array([0, 1])) == 1


def test_probabilities_at_a_temperature_are_those_of_divided_logits():
    logits, _ = drawn(cases=20)
    for given in (1.0, 2.5, 100.0):
        expected = (logits / given).softmax(-1).numpy()
        assert at_temperature(logits.softmax(-1).numpy(), given) == pytest.approx(expected, rel=1e-9)
    certain = at_temperature(np.array([1.0, 0.0]), 10.0)
    assert np.isfinite(certain).all() and certain[0] > certain[1] > 0


def test_a_wrong_case_with_a_probability_of_0_gives_a_finite_temperature():
    certain = np.array([[1.0, 0.0]] * 9 + [[0.0, 1.0]])
    assert 1 < temperature(certain, np.zeros(10)) < 100
