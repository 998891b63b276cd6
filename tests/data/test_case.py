"""medconv/data/case.py: spacing, orientation, and when two grids are one."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.volumes import ORIENTATIONS, affine_of, rotation

from medconv.data.case import Case, Grid
from medconv.data.io.images import check_same_grid, on_grid

SHAPE = (20, 24, 10)
SPACING_MM = (0.8, 1.25, 3.0)
HERE, THERE = Path("image.nii.gz"), Path("label.nii.gz")


def oblique(angles_deg: tuple[float, float, float] = (20, -35, 10), origin: float = 0.0) -> np.ndarray:
    affine = np.eye(4)
    affine[:3, :3] = rotation(angles_deg) @ np.diag(SPACING_MM)
    affine[:3, 3] = origin
    return affine


@pytest.mark.parametrize(("axes", "signs"), ORIENTATIONS)
def test_spacing_and_orientation_follow_the_array_axes(axes: tuple[int, ...], signs: tuple[int, ...]) -> None:
    grid = Grid.of(SHAPE, affine_of(axes, signs, SPACING_MM, (5, 6, 7)))
    assert grid.spacing_mm == pytest.approx(SPACING_MM)
    assert grid.orientation == "".join({1: "RAS", -1: "LPI"}[s][a] for a, s in zip(axes, signs, strict=True))


def test_oblique_grid_has_the_same_spacing_and_the_nearest_orientation() -> None:
    grid = Grid.of(SHAPE, oblique())
    assert grid.spacing_mm == pytest.approx(SPACING_MM)
    assert grid.orientation == "".join(nib.aff2axcodes(oblique())) == "RAS"


@pytest.mark.parametrize(
    ("shape", "expected"), [((4, 5), (4, 5, 1)), ((4, 5, 6), (4, 5, 6)), ((4, 5, 6, 3), (4, 5, 6))]
)
def test_shape_has_three_axes_and_no_channels(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert Grid.of(shape, np.eye(4)).shape == expected


def test_grids_compare_by_value() -> None:
    one, same, other = (Grid.of(SHAPE, affine) for affine in (oblique(), oblique(), oblique(origin=1)))
    assert one == same and hash(one) == hash(same)
    assert one != other
    np.testing.assert_array_equal(one.matrix, oblique())


@pytest.mark.parametrize("origin", [0.0, 1e6])
@pytest.mark.parametrize("axis", range(3))
def test_corner_distance_of_a_shift_is_in_voxels(axis: int, origin: float) -> None:
    affine, moved = oblique(origin=origin), oblique(origin=origin)
    moved[:3, 3] += 0.5 * affine[:3, axis]
    assert Grid.of(SHAPE, affine).corner_distance(Grid.of(SHAPE, moved)) == pytest.approx(0.5, abs=1e-6)


def test_corner_distance_is_the_largest_one() -> None:
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


@pytest.mark.parametrize("origin", [0.0, -37.5, 1e6])
@pytest.mark.parametrize("angles", [(0, 0, 0), (20, -35, 10)])
@pytest.mark.parametrize("axis", range(3))
def test_grids_within_a_hundredth_of_a_voxel_agree(
    axis: int, angles: tuple[float, float, float], origin: float
) -> None:
    affine = oblique(angles, origin)

    def moved(voxels: float) -> Grid:
        other = affine.copy()
        other[:3, 3] += voxels * affine[:3, axis]
        return Grid.of(SHAPE, other)

    check_same_grid(HERE, moved(0), THERE, moved(0.0099))
    with pytest.raises(
        ValueError, match=r"label\.nii\.gz: its affine puts .* 0\.02 voxels from where image\.nii\.gz"
    ):
        check_same_grid(HERE, moved(0), THERE, moved(0.02))


def test_flipped_grids_differ() -> None:
    """The same corners of the same box of space, but the voxels run the other way."""
    affine, flipped = np.diag([1.0, 1, 1, 1]), np.diag([-1.0, 1, 1, 1])
    flipped[0, 3] = SHAPE[0] - 1
    with pytest.raises(ValueError, match=r"corners 20 voxels from .*: LAS .* against RAS "):
        check_same_grid(HERE, Grid.of(SHAPE, affine), THERE, Grid.of(SHAPE, flipped))


def test_files_are_images_and_label() -> None:
    images = (Path("a_0000.nii.gz"), Path("a_0001.nii.gz"))
    assert Case("a", images).files == images
    assert Case("a", images, THERE).files == (*images, THERE)


@pytest.mark.parametrize("orientation", ["LPS", "RAS", "ASL", "SRP"])
def test_a_label_in_another_orientation_of_the_same_grid_is_turned(orientation: str) -> None:
    label = np.random.default_rng(0).integers(0, 9, SHAPE)
    image = nib.Nifti1Image(label.astype(np.int16), oblique())
    ours, codes = nib.io_orientation(oblique()), nib.orientations.axcodes2ornt(orientation)
    other = image.as_reoriented(nib.orientations.ornt_transform(ours, codes))
    grid, theirs = Grid.of(SHAPE, oblique()), Grid.of(other.shape, other.affine)
    np.testing.assert_array_equal(on_grid(np.asarray(other.dataobj), HERE, grid, THERE, theirs), label)
    mirrored, shifted = other.affine.copy(), other.affine.copy()
    mirrored[:, 0] *= -1
    shifted[:3, 3] += 0.5 * shifted[:3, 0]
    for affine in (mirrored, shifted):
        with pytest.raises(ValueError, match=r"label\.nii\.gz: (its affine puts|shape)"):
            on_grid(np.asarray(other.dataobj), HERE, grid, THERE, Grid.of(other.shape, affine))


@pytest.mark.parametrize(("axes", "signs"), ORIENTATIONS)
def test_stated_spacing_is_of_the_patients_axes(axes: tuple[int, ...], signs: tuple[int, ...]) -> None:
    lost = Grid.of(SHAPE, affine_of(axes, signs, (1, 1, 1), (5, 6, 7)))
    stated = lost.with_spacing_mm(SPACING_MM)
    assert stated.spacing_mm == pytest.approx([SPACING_MM[axis] for axis in axes])
    assert stated.orientation == lost.orientation and stated.shape == lost.shape
    middle = np.array([*((n - 1) / 2 for n in SHAPE), 1])
    np.testing.assert_allclose(stated.matrix @ middle, lost.matrix @ middle)


def test_stated_spacing_has_a_number_for_each_axis() -> None:
    flat = Grid.of((4, 5), np.eye(4)).with_spacing_mm((0.5, 0.25))
    assert flat.spacing_mm == (0.5, 0.25, 1.0)
    with pytest.raises(ValueError, match=r"data.source_spacing_mm: expected three numbers .* got \[1, 2\]"):
        Grid.of(SHAPE, np.eye(4)).with_spacing_mm([1, 2])
