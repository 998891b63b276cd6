"""When two files describe one grid, and a label map turned to the axes of its image."""

from pathlib import Path

import nibabel as nib
import numpy as np

from medconv.data.case import Grid
from medconv.utils.logging import size_text

_SAME_GRID = 0.01  # voxels by which the corners of one grid may differ


def check_same_grid(
    path: Path, grid: Grid, other_path: Path, other: Grid, tolerance: float = _SAME_GRID
) -> None:
    """Raises: ValueError: shapes differ, or some corner lies more than `tolerance` voxels apart."""
    if grid.shape != other.shape:
        raise ValueError(f"{other_path}: shape {other.shape} differs from that of {path}, {grid.shape}")
    distance = grid.corner_distance(other)
    if distance > tolerance:
        raise ValueError(
            f"{other_path}: its affine puts the volume's corners {distance:.3g} voxels from where "
            f"{path} has them (at most {tolerance} is allowed): {_shown(other)} against {_shown(grid)}"
        )


def on_grid(label: np.ndarray, path: Path, grid: Grid, other_path: Path, other: Grid) -> np.ndarray:
    """A label map, its axes turned to those of an image where both describe one physical grid.

    Shape: (X, Y, Z) of `other` -> (X, Y, Z) of `grid`.
    Raises: ValueError: as `check_same_grid`, once turned; shifted or mirrored grids are not one grid.
    """
    to_ours = nib.orientations.ornt_transform(*map(nib.io_orientation, (other.matrix, grid.matrix)))
    turned = nib.orientations.apply_orientation(label, to_ours)
    affine = other.matrix @ nib.orientations.inv_ornt_aff(to_ours, other.shape)
    if turned.shape != grid.shape or grid.corner_distance(Grid.of(turned.shape, affine)) > _SAME_GRID:
        check_same_grid(path, grid, other_path, other)  # names both as their files have them
        return label
    return np.ascontiguousarray(turned)


def _shown(grid: Grid) -> str:
    first = ", ".join(f"{mm:.6g}" for mm in grid.matrix[:3, 3])
    return f"{grid.orientation} {size_text(grid.spacing_mm, 3)} mm from ({first})"
