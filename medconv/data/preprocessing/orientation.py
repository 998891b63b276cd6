"""Axes of an image: turned to right, anterior, superior, or as stored; and back."""

import nibabel as nib
import numpy as np

from medconv.data.case import Grid

_RAS = np.array([[0, 1], [1, 1], [2, 1]], dtype=float)  # an orientation, as nibabel has them


def to_canonical(
    array: np.ndarray, grid: Grid, reorient: bool = True
) -> tuple[np.ndarray, tuple[float, ...]]:
    """Reorient the axes to right, anterior, superior by flips and permutations; a single slice is unchanged.

    Shape: (channels, X, Y, Z) -> (channels, R, A, S). Returns: the array and its spacing in mm.
    Args: reorient: False: the axes stay as stored.
    """
    return _reorient(array, _orientation(grid, reorient)), canonical_spacing(grid, reorient)


def from_canonical(volume: np.ndarray, grid: Grid, reoriented: bool = True) -> np.ndarray:
    """The inverse of `to_canonical`: (R, A, S) -> (X, Y, Z), contiguous."""
    back = nib.orientations.ornt_transform(_RAS, _orientation(grid, reoriented))
    return np.ascontiguousarray(_reorient(volume[None], back)[0])


def _orientation(grid: Grid, reorient: bool) -> np.ndarray:
    return nib.orientations.io_orientation(grid.matrix) if reorient and grid.shape[2] > 1 else _RAS


def canonical_spacing(grid: Grid, reorient: bool = True) -> tuple[float, ...]:
    """In mm, right, anterior, superior. Args: as of `to_canonical`."""
    spacing = np.empty(3)
    spacing[_orientation(grid, reorient)[:, 0].astype(int)] = grid.spacing_mm
    return tuple(float(s) for s in spacing)


def _reorient(array: np.ndarray, orientation: np.ndarray) -> np.ndarray:
    return np.stack([nib.orientations.apply_orientation(channel, orientation) for channel in array])
