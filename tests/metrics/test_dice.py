"""medconv/metrics/dice.py: Dice against sets of voxels, and means that skip undefined classes."""

import numpy as np
import pytest
from reference import overlap

from medconv.metrics.dice import dice, mean, mean_per_class, value_counts
from medconv.targets.label_map import LabelMapTargets

NAMES = ("background", "liver", "spleen", "cyst")
TARGETS = LabelMapTargets.of_classes(NAMES)


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 5)])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_dice_equals_that_of_sets_of_voxels(shape, seed, dtype):
    rng = np.random.default_rng(seed)
    prediction, reference = (rng.integers(0, rng.integers(2, 5), shape).astype(dtype) for _ in range(2))
    row = dice(prediction, reference, TARGETS)
    assert list(row) == ["liver", "spleen", "cyst"]
    assert row == pytest.approx(overlap.dice(prediction, reference, NAMES))
    assert all(value is None or type(value) is float for value in row.values())


def test_a_class_in_neither_map_is_undefined_and_in_one_map_zero():
    prediction, reference = np.zeros((2, 4, 4), np.uint8)
    prediction[0, :2], reference[0, 1:3] = 1, 1
    prediction[3] = 2
    assert dice(prediction, reference, TARGETS) == {"liver": 0.5, "spleen": 0.0, "cyst": None}
    assert dice(reference, prediction, TARGETS) == {"liver": 0.5, "spleen": 0.0, "cyst": None}
    assert dice(reference, reference, TARGETS) == {"liver": 1.0, "spleen": None, "cyst": None}
    assert dice(np.zeros((2, 2), int), np.zeros((2, 2), int), TARGETS) == {
        "liver": None,
        "spleen": None,
        "cyst": None,
    }


def test_counts_do_not_overflow_small_label_types():
    ones = np.ones((40, 40), np.uint8)
    assert dice(ones, ones, LabelMapTargets.of_classes(("background", "all"))) == {"all": 1.0}


def test_mean_per_class_skips_undefined_cases():
    rows = [
        {"a": 0.5, "b": None, "c": None},
        {"a": 1.0, "b": 0.25, "c": None},
        {"a": 0.0, "b": 0.75, "c": None},
    ]
    assert mean_per_class(rows) == {"a": 0.5, "b": 0.5, "c": None}
    assert mean_per_class(rows[:1]) == {"a": 0.5, "b": None, "c": None}
    assert mean_per_class([]) == {}


def test_mean_skips_undefined_classes():
    assert mean([0.5, None, 0.0]) == 0.25
    assert mean([None]) is None
    assert mean([]) is None


@pytest.mark.parametrize("order", ["C", "F"])
def test_counts_equal_those_of_unique(order):
    """More voxels than are counted at once."""
    drawn = np.random.default_rng(0).choice([0, 1, 5, 300], (80, 70, 60))
    label = np.array(drawn, np.int16, order=order)
    values, voxels = np.unique(label, return_counts=True)
    counts = value_counts(label)
    assert len(counts) == 301 and counts.sum() == label.size
    np.testing.assert_array_equal(counts[values], voxels)


def test_no_voxels_have_no_value():
    assert value_counts(np.empty((0, 3), np.uint8)).tolist() == [0]
