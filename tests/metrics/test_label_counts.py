"""medconv/metrics/label_counts.py: compared with NumPy's `unique`."""

import numpy as np
import pytest

from medconv.metrics.label_counts import value_counts


@pytest.mark.parametrize("order", ["C", "F"])
def test_counts_equal_those_of_unique(order: str) -> None:
    """More voxels than are counted at once."""
    drawn = np.random.default_rng(0).choice([0, 1, 5, 300], (80, 70, 60))
    label = np.array(drawn, np.int16, order=order)  # type: ignore[call-overload]
    values, voxels = np.unique(label, return_counts=True)
    counts = value_counts(label)
    assert len(counts) == 301 and counts.sum() == label.size
    np.testing.assert_array_equal(counts[values], voxels)


def test_no_voxels_have_no_value() -> None:
    assert value_counts(np.empty((0, 3), np.uint8)).tolist() == [0]
