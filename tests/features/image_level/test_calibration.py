"""medconv/features/image_level/calibration.py: temperatures against a grid of them."""

import numpy as np
import pytest
import torch

from medconv.features.image_level.calibration import at_temperature, temperature


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
