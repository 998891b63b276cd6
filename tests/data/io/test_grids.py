"""medconv/data/io/grids.py: when two grids are one, labels in another orientation, and copies in C order."""

import re
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.volumes import oblique

from medconv.data.case import Grid
from medconv.data.io.grids import (
    check_same_grid,
    fill,
    from_canonical,
    in_c_order,
    on_grid,
    rounding_doubts,
    to_canonical,
)

SHAPE = (20, 24, 10)
HERE, THERE = Path("image.nii.gz"), Path("label.nii.gz")


@pytest.mark.parametrize("origin", [0.0, -37.5, 1e6])
@pytest.mark.parametrize("angles", [(0, 0, 0), (20, -35, 10)])
@pytest.mark.parametrize("axis", range(3))
def test_grids_within_a_tenth_of_a_voxel_agree_and_above_a_hundredth_there_is_a_word(axis, angles, origin):
    affine = oblique(angles, origin)

    def moved(voxels):
        other = affine.copy()
        other[:3, 3] += voxels * affine[:3, axis]
        return Grid.of(SHAPE, other)

    check_same_grid(HERE, moved(0), THERE, moved(0.0099))
    assert rounding_doubts(HERE, moved(0), THERE, moved(0.0099)) == []
    check_same_grid(HERE, moved(0), THERE, moved(0.099))
    (doubt,) = rounding_doubts(HERE, moved(0), THERE, moved(0.02))
    assert re.fullmatch(
        r"label\.nii\.gz: its corners lie 0\.02 voxels from those of image\.nii\.gz \(first voxel at .* against "
        r".* mm apart\); taken as one grid",
        doubt,
    )
    with pytest.raises(
        ValueError,
        match=r"label\.nii\.gz: its affine puts .* 0\.11 voxels from where image\.nii\.gz .*: first voxel at \(",
    ):
        check_same_grid(HERE, moved(0), THERE, moved(0.11))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            np.array([[1, -6.6e-5, 0], [6.6e-5, 1, 0], [0, 0, 1]]),
            r"axes turned by 0\.00378, 0\.00378, 0 degrees",
        ),
        (np.diag([1.0002, 1, 1]), r"0\.5001 x 0\.5 x 3 mm against 0\.5 x 0\.5 x 3"),
    ],
    ids=["ITK's axes", "spacing"],
)
def test_what_differs_is_said_to_the_digit_that_differs(change, expected):
    """Axes as an sform with rounded cosines has them, and those that ITK stores, on 320 x 384 voxels."""
    affine, other = np.diag([-0.5, -0.5, 3, 1]), np.diag([-0.5, -0.5, 3, 1])
    other[:3, :3] = change @ affine[:3, :3]
    grid, their_grid = Grid.of((320, 384, 20), affine), Grid.of((320, 384, 20), other)
    check_same_grid(HERE, grid, THERE, their_grid)
    (doubt,) = rounding_doubts(HERE, grid, THERE, their_grid)
    assert re.search(rf"\({expected}\)", doubt)


def test_flipped_grids_differ():
    """The same corners of the same box of space, but the voxels run the other way."""
    affine, flipped = np.diag([1.0, 1, 1, 1]), np.diag([-1.0, 1, 1, 1])
    flipped[0, 3] = SHAPE[0] - 1
    with pytest.raises(
        ValueError, match=r"corners 20 voxels from .*: axes LAS against RAS; .* 180, 0, 0 degrees"
    ):
        check_same_grid(HERE, Grid.of(SHAPE, affine), THERE, Grid.of(SHAPE, flipped))


@pytest.mark.parametrize("orientation", ["LPS", "RAS", "ASL", "SRP"])
def test_a_label_in_another_orientation_of_the_same_grid_is_turned(orientation):
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


@pytest.mark.parametrize(("volume_axis", "axes"), [(2, "RA"), (1, "RS"), (0, "AS")])
@pytest.mark.parametrize("stored", ["LPS", "RAS", "PIR", "SLA"])
def test_a_single_slice_has_the_axes_that_it_has_as_a_slice_of_a_volume(volume_axis, axes, stored):
    """Whatever axes its file has; the way back is exact."""
    volume = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    image = nib.Nifti1Image(volume.astype(np.int16), np.diag([2.0, 3, 4, 1]))
    transform = nib.orientations.ornt_transform(
        nib.io_orientation(image.affine), nib.orientations.axcodes2ornt(stored)
    )
    turned = image.as_reoriented(transform)
    stored_axis = next(axis for axis, code in enumerate(stored) if code in ("RL", "AP", "SI")[volume_axis])
    # The slice across the stored axis, which becomes the third one of its file
    across = turned.slicer[tuple(slice(0, 1) if axis == stored_axis else slice(None) for axis in range(3))]
    order = [axis for axis in range(3) if axis != stored_axis] + [stored_axis]
    array = np.asarray(across.dataobj).transpose(order)
    grid = Grid.of(array.shape, across.affine[:, [*order, 3]])
    expected = np.moveaxis(volume, volume_axis, 2)
    is_reversed = stored[stored_axis] in "LPI"
    expected = expected[:, :, -1:] if is_reversed else expected[:, :, :1]
    canonical, spacing_mm = to_canonical(array[None], grid)
    np.testing.assert_array_equal(canonical[0], expected)
    assert spacing_mm[:2] == pytest.approx([{"R": 2, "A": 3, "S": 4}[axis] for axis in axes])
    np.testing.assert_array_equal(from_canonical(canonical[0], grid), array)


def stored(kind, shape):
    values = np.random.default_rng(0).integers(0, 100, shape, dtype=np.int16)
    if kind == "flipped":
        return values[::-1, ..., ::-1]
    if kind == "turned":
        return values.transpose()
    return np.array(values, order=kind)


@pytest.mark.parametrize("shape", [(5, 6, 7), (3, 9, 35), (5, 6, 1), (1, 6, 7), (5, 6), (0, 3, 4)])
@pytest.mark.parametrize("kind", ["C", "F", "flipped", "turned"])
def test_a_copy_has_the_same_values_in_c_order(kind, shape):
    source = stored(kind, shape)
    target = np.full(source.shape, np.nan, np.float32)
    fill(target, source)
    np.testing.assert_array_equal(target, source)
    copied = in_c_order(source, np.int32)
    assert copied.flags.c_contiguous and copied.dtype == np.int32
    np.testing.assert_array_equal(copied, source)


def test_an_array_in_order_is_not_copied():
    source = stored("C", (5, 6, 7))
    assert in_c_order(source) is source and in_c_order(source, np.int16) is source
    assert not np.may_share_memory(in_c_order(source.T), source)
