"""Grids of files: whether two are the same, and axes turned to right, anterior, superior, and back.

Also copies between arrays that store their axes in opposite orders, such as NIfTI files and NumPy's arrays.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from medconv.data.case import Grid
from medconv.utils.logging import size_text

# Voxels by which the corners of one grid may differ: ITK stores the nearest axes at right angles, and headers
# round, which far corners show.
_SAME_GRID = 0.1
_ROUNDING = 0.01  # voxels; more is worth a word
_FAR_DIGIT = 1e-6  # relative, or in radians: what differs by less is not named
# Of a block that is copied:
_LINES = 4  # along the middle axis, which share the memory pages of the source
_DEPTH = 16  # along the last axis: planes of 512 x 512 voxels all fall into the same few lines of the cache
# An orientation as nibabel has them: for each axis of the array, an anatomical axis and a direction.
_RAS = np.array([[0, 1], [1, 1], [2, 1]], dtype=float)


def check_same_grid(path: Path, grid: Grid, other_path: Path, other_grid: Grid) -> None:
    """Check that two files describe one physical grid, with the same order of axes.

    Args:
        path: the reference, such as the image.
        other_path: the file to check, named first in the message.

    Raises:
        ValueError: shapes differ, or some corner lies more than 0.1 voxels apart.
    """
    if grid.shape != other_grid.shape:
        raise ValueError(f"{other_path}: shape {other_grid.shape} differs from that of {path}, {grid.shape}")
    distance = grid.corner_distance(other_grid)
    if distance > _SAME_GRID:
        raise ValueError(
            f"{other_path}: its affine puts the volume's corners {distance:.3g} voxels from where "
            f"{path} has them (at most {_SAME_GRID} is allowed): {_difference(grid, other_grid)}"
        )


def rounding_doubts(path: Path, grid: Grid, other_path: Path, other_grid: Grid) -> list[str]:
    """A warning about two files of one grid whose corners are farther apart than by rounded numbers.

    Args: as of `check_same_grid`, which accepts them, `other_grid` in any order of axes.
    """
    other_grid, _ = _turned(other_grid, grid)
    distance = grid.corner_distance(other_grid)
    if not _ROUNDING < distance <= _SAME_GRID:
        return []
    return [
        f"{other_path}: its corners lie {distance:.2g} voxels from those of {path} "
        f"({_difference(grid, other_grid)}); taken as one grid"
    ]


def on_grid(label: np.ndarray, path: Path, grid: Grid, label_path: Path, label_grid: Grid) -> np.ndarray:
    """A label map, reoriented to the axes of its image if both describe one physical grid.

    Shape: (X, Y, Z) of `label_grid` -> (X, Y, Z) of `grid`.

    Raises:
        ValueError: as `check_same_grid`, after reorientation; shifted or mirrored grids are not one grid.
    """
    reoriented_grid, transform = _turned(label_grid, grid)
    if reoriented_grid.shape != grid.shape or grid.corner_distance(reoriented_grid) > _SAME_GRID:
        # The message describes both grids as stored in their files
        check_same_grid(path, grid, label_path, label_grid)
        return label
    return in_c_order(nib.orientations.apply_orientation(label, transform))


def _turned(grid: Grid, wanted: Grid) -> tuple[Grid, np.ndarray]:
    """A grid with its axes in the order and direction of another, and the way there, as nibabel has it."""
    orientations = [nib.orientations.io_orientation(each.matrix) for each in (grid, wanted)]
    transform: np.ndarray = nib.orientations.ornt_transform(*orientations)
    shape = np.empty(3, int)
    shape[transform[:, 0].astype(int)] = grid.shape
    affine = grid.matrix @ nib.orientations.inv_ornt_aff(transform, grid.shape)
    return Grid.of(shape.tolist(), affine), transform


def _difference(grid: Grid, other: Grid) -> str:
    """In what two grids of one shape differ, the second one first."""
    differences = []
    if grid.orientation != other.orientation:
        differences.append(f"axes {other.orientation} against {grid.orientation}")
    if not np.allclose(other.spacing_mm, grid.spacing_mm, rtol=_FAR_DIGIT, atol=0):
        differences.append(f"{size_text(other.spacing_mm, 8)} mm against {size_text(grid.spacing_mm, 8)}")
    axes = zip(_directions(grid), _directions(other), strict=True)
    degrees = np.rad2deg([np.arctan2(np.linalg.norm(np.cross(*pair)), np.dot(*pair)) for pair in axes])
    if degrees.max() > np.rad2deg(_FAR_DIGIT):
        differences.append(f"axes turned by {', '.join(f'{angle:.3g}' for angle in degrees)} degrees")
    first_voxel, other_first_voxel = grid.matrix[:3, 3], other.matrix[:3, 3]
    apart_mm = float(np.linalg.norm(other_first_voxel - first_voxel))
    if apart_mm > _FAR_DIGIT * min(grid.spacing_mm):
        places = [", ".join(f"{mm:.6g}" for mm in place) for place in (other_first_voxel, first_voxel)]
        differences.append(f"first voxel at ({places[0]}) against ({places[1]}), {apart_mm:.2g} mm apart")
    return "; ".join(differences)


def _directions(grid: Grid) -> np.ndarray:
    """Unit vectors along the axes of the array, one in each row."""
    directions: np.ndarray = grid.matrix[:3, :3].T / np.array(grid.spacing_mm)[:, None]
    return directions


def to_canonical(
    array: np.ndarray, grid: Grid, reorient: bool = True
) -> tuple[np.ndarray, tuple[float, ...]]:
    """Reorient the axes to right, anterior, superior by flips and permutations.

    Shape: (channels, X, Y, Z) -> (channels, R, A, S), of a single slice (channels, R, A, 1), (channels, R, S,
    1) or (channels, A, S, 1), see `Grid.canonical_axes`.
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
    return grid.canonical_axes if reorient else _RAS


def canonical_spacing(grid: Grid, reorient: bool = True) -> tuple[float, ...]:
    """In mm: right, anterior, superior."""
    return tuple(float(mm) for mm in _in_canonical_order(grid.spacing_mm, grid, reorient))


def canonical_shape(grid: Grid, reorient: bool) -> tuple[int, ...]:
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


def fill(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, several times as fast for a volume that is stored the other way round.

    NumPy walks through such a source with the largest stride, which misses the cache at each voxel. Blocks
    have few enough lines to stay in it.

    Shape: both the same; C order for `target`.
    """
    if source.ndim != 3 or source.shape[2] == 1 or source.flags.c_contiguous:
        target[...] = source
        return
    _, lines, depth = source.shape
    for line, plane in product(range(0, lines, _LINES), range(0, depth, _DEPTH)):
        block = (slice(None), slice(line, line + _LINES), slice(plane, plane + _DEPTH))
        target[block] = source[block]


def in_c_order(array: np.ndarray, dtype: Any = None) -> np.ndarray:
    """The array itself if it has this type and C order, else a copy that has; `dtype` None: its own."""
    dtype = np.dtype(dtype or array.dtype)
    if array.flags.c_contiguous and array.dtype == dtype:
        return array
    copied = np.empty(array.shape, dtype)
    fill(copied, array)
    return copied
