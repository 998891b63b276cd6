"""medconv/data/case.py: spacing, orientation, and how far two grids lie apart."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.volumes import OBLIQUE_MM, ORIENTATIONS, affine_of, oblique, rotation

from medconv.data.case import Case, Grid

SHAPE = (20, 24, 10)


@pytest.mark.parametrize(("axes", "signs"), ORIENTATIONS)
def test_spacing_and_orientation_follow_the_array_axes(axes, signs):
    grid = Grid.of(SHAPE, affine_of(axes, signs, OBLIQUE_MM, (5, 6, 7)))
    assert grid.spacing_mm == pytest.approx(OBLIQUE_MM)
    assert grid.orientation == "".join({1: "RAS", -1: "LPI"}[s][a] for a, s in zip(axes, signs, strict=True))


def test_oblique_grid_has_the_same_spacing_and_the_nearest_orientation():
    grid = Grid.of(SHAPE, oblique())
    assert grid.spacing_mm == pytest.approx(OBLIQUE_MM)
    assert grid.orientation == "".join(nib.aff2axcodes(oblique())) == "RAS"


@pytest.mark.parametrize(
    ("shape", "expected"), [((4, 5), (4, 5, 1)), ((4, 5, 6), (4, 5, 6)), ((4, 5, 6, 3), (4, 5, 6))]
)
def test_shape_has_three_axes_and_no_channels(shape, expected):
    assert Grid.of(shape, np.eye(4)).shape == expected


def test_grids_compare_by_value():
    one, same, other = (Grid.of(SHAPE, affine) for affine in (oblique(), oblique(), oblique(origin=1)))
    assert one == same and hash(one) == hash(same)
    assert one != other
    np.testing.assert_array_equal(one.matrix, oblique())


@pytest.mark.parametrize("origin", [0.0, 1e6])
@pytest.mark.parametrize("axis", range(3))
def test_corner_distance_of_a_shift_is_in_voxels(axis, origin):
    affine, moved = oblique(origin=origin), oblique(origin=origin)
    moved[:3, 3] += 0.5 * affine[:3, axis]
    assert Grid.of(SHAPE, affine).corner_distance(Grid.of(SHAPE, moved)) == pytest.approx(0.5, abs=1e-6)


def test_corner_distance_is_the_largest_one():
    """A spacing that is wrong by 1 % puts the last edge of 20 voxels, at 19.5, off by 0.195 voxels; the
    origin agrees.
    """
    grid, other = Grid.of(SHAPE, np.diag([1.0, 1, 1, 1])), Grid.of(SHAPE, np.diag([1.01, 1, 1, 1]))
    assert grid.corner_distance(other) == pytest.approx(0.195)
    corners = np.array([[x, y, z] for x in (-0.5, 19.5) for y in (-0.5, 23.5) for z in (-0.5, 9.5)])
    turned = np.eye(4)
    turned[:3, :3] = rotation((1, 2, 3))
    distance = np.abs(corners @ turned[:3, :3].T - corners).max()
    assert grid.corner_distance(Grid.of(SHAPE, turned)) == pytest.approx(distance)


def test_files_are_images_and_label():
    images = (Path("a_0000.nii.gz"), Path("a_0001.nii.gz"))
    assert Case("a", images).files == images
    assert Case("a", images, Path("label.nii.gz")).files == (*images, Path("label.nii.gz"))


@pytest.mark.parametrize(("axes", "signs"), ORIENTATIONS)
def test_stated_spacing_is_of_the_patients_axes(axes, signs):
    lost = Grid.of(SHAPE, affine_of(axes, signs, (1, 1, 1), (5, 6, 7)))
    stated = lost.with_spacing_mm(OBLIQUE_MM)
    assert stated.spacing_mm == pytest.approx([OBLIQUE_MM[axis] for axis in axes])
    assert stated.orientation == lost.orientation and stated.shape == lost.shape
    middle = np.array([*((n - 1) / 2 for n in SHAPE), 1])
    np.testing.assert_allclose(stated.matrix @ middle, lost.matrix @ middle)


def test_stated_spacing_has_a_number_for_each_axis():
    flat = Grid.of((4, 5), np.eye(4)).with_spacing_mm((0.5, 0.25))
    assert flat.spacing_mm == (0.5, 0.25, 1.0)
    with pytest.raises(ValueError, match=r"spacing_mm: expected three numbers .* got \[1, 2\]"):
        Grid.of(SHAPE, np.eye(4)).with_spacing_mm([1, 2])
