import numpy as np
import pytest

from medconv.data.augmentation.read_size import rotated_half, size_that_holds


def _farthest(half: np.ndarray, spacing: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """The corners of a rectangle, turned by each angle, along each axis; in voxels."""
    corners = np.array([[1, 1], [1, -1]]) * half * spacing  # mm
    turns = np.stack([np.cos(angles), -np.sin(angles), np.sin(angles), np.cos(angles)], -1).reshape(-1, 2, 2)
    turned = np.einsum("tij,cj->tci", turns, corners)
    farthest: np.ndarray = abs(turned).max((0, 1)) / spacing
    return farthest


@pytest.mark.parametrize("degrees", [0.0, 20.0, 60.0, 180.0])
@pytest.mark.parametrize("spacing", [(1.0, 1.0), (0.5, 1.2)])
def test_rotated_corners_are_as_far_as_the_farthest_of_many_angles(
    degrees: float, spacing: tuple[float, float]
) -> None:
    patch = (40, 24)
    angles = np.deg2rad(np.linspace(-degrees, degrees, 20001))
    expected = _farthest(np.array(patch) / 2, np.array(spacing), angles)
    distance = rotated_half(patch, spacing, degrees, np.array([True, True]))
    np.testing.assert_allclose(distance, expected, rtol=1e-6)


def test_an_axis_that_does_not_rotate_keeps_its_half() -> None:
    distance = rotated_half((40, 24, 8), (1, 1, 5), 30.0, np.array([True, True, False]))
    assert distance[2] == 4
    assert (distance[:2] > [20, 12]).all()


def test_a_size_has_the_centre_of_the_patch_and_a_voxel_to_interpolate_from() -> None:
    assert size_that_holds((8, 7), np.array([4.0, 3.5])) == (10, 9)
    assert size_that_holds((8, 7), np.array([6.5, 3.6])) == (16, 11)
