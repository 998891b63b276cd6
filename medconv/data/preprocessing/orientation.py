"""Axes of an image: turned to right, anterior, superior, or as stored; and back."""

from collections.abc import Sequence

import nibabel as nib
import numpy as np

from medconv.data.case import Grid
from medconv.utils.memory_order import fill, in_c_order

# An orientation as nibabel has them: for each axis of the array, an anatomical axis and a direction.
_RAS = np.array([[0, 1], [1, 1], [2, 1]], dtype=float)


def to_canonical(
    array: np.ndarray, grid: Grid, reorient: bool = True
) -> tuple[np.ndarray, tuple[float, ...]]:
    """Reorient the axes to right, anterior, superior by flips and permutations; a single slice is unchanged.

    Shape: (channels, X, Y, Z) -> (channels, R, A, S).
    Args:
        reorient: False: the axes stay as stored.
    Returns:
        The array and its spacing in mm.
    """
    orientation = _orientation(grid, reorient)
    return _reorient(array, orientation), canonical_spacing(grid, reorient)


def from_canonical(volume: np.ndarray, grid: Grid, reoriented: bool = True) -> np.ndarray:
    """The inverse of `to_canonical`: (R, A, S) -> (X, Y, Z), contiguous."""
    orientation = _orientation(grid, reoriented)
    back = nib.orientations.ornt_transform(_RAS, orientation)
    native = _reorient(volume[None], back)[0]
    return in_c_order(native)


def _orientation(grid: Grid, reorient: bool) -> np.ndarray:
    is_slice = grid.shape[2] == 1
    if not reorient or is_slice:
        return _RAS
    orientation: np.ndarray = nib.orientations.io_orientation(grid.matrix)
    return orientation


def canonical_spacing(grid: Grid, reorient: bool = True) -> tuple[float, ...]:
    """In mm: right, anterior, superior.

    Args:
        reorient: as of `to_canonical`.
    """
    return tuple(float(mm) for mm in _in_canonical_order(grid.spacing_mm, grid, reorient))


def canonical_shape(grid: Grid, reorient: bool = True) -> tuple[int, ...]:
    """In voxels, in the order of `canonical_spacing`."""
    return tuple(int(voxels) for voxels in _in_canonical_order(grid.shape, grid, reorient))


def _in_canonical_order(values: Sequence[float], grid: Grid, reorient: bool) -> np.ndarray:
    """Args: values: of each axis of the file."""
    canonical_axes = _orientation(grid, reorient)[:, 0].astype(int)
    in_order = np.empty(3)
    in_order[canonical_axes] = values
    return in_order


def _reorient(array: np.ndarray, orientation: np.ndarray) -> np.ndarray:
    """The same array if nothing turns, else a copy."""
    if np.array_equal(orientation, _RAS):
        return array
    channels = [nib.orientations.apply_orientation(channel, orientation) for channel in array]
    turned = np.empty((len(channels), *channels[0].shape), array.dtype)
    for index, channel in enumerate(channels):
        fill(turned[index], channel)
    return turned
