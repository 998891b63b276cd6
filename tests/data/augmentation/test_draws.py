"""medconv/data/augmentation/draws.py: ranges of factors, and rotations in a plane."""

from itertools import cycle

import numpy as np
import pytest

from medconv.data.augmentation.draws import between, factor, plane_rotation


def test_a_range_is_reached_from_its_lower_end() -> None:
    assert between(lambda: 0.0, (2, 4)) == 2 and between(lambda: 0.75, (2, 4)) == 3.5


@pytest.mark.parametrize(("numbers", "expected"), [((0.4, 0.5), 0.75), ((0.6, 0.5), 2.0)])
def test_a_factor_is_as_often_below_1_as_above(numbers: tuple[float, ...], expected: float) -> None:
    assert factor(cycle(numbers).__next__, (0.5, 3.0)) == expected


def test_a_rotation_turns_its_plane_alone() -> None:
    rotation = plane_rotation(3, 0, 2, np.pi / 2)
    np.testing.assert_allclose(rotation @ [1, 0, 0], [0, 0, 1], atol=1e-12)
    np.testing.assert_allclose(rotation @ [0, 1, 0], [0, 1, 0], atol=1e-12)
