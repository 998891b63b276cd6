"""Distances between the surfaces of two binary masks in mm, and metrics computed from them.

HD95 and the average distance use boundary voxels: voxels of the mask that share a face with the background.
The surface Dice uses surface elements between voxel centres, weighted by area: counting voxels would
underweight slanted surfaces and surfaces across thick slices. MONAI does the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from monai.metrics.utils import get_code_to_measure_table
from numpy.lib.stride_tricks import sliding_window_view
from scipy.ndimage import generate_binary_structure
from scipy.spatial import KDTree


@dataclass(frozen=True)
class Distances:
    """From every point of each of two surfaces to the nearest point of the other.

    Args:
        there: mm, from each point of the first mask's surface to the second's.
        back: mm, from each point of the second mask's surface to the first's.
        there_area: weight of each point of the first surface: mm^2 (mm in 2D), or 1 for a voxel.
        back_area: the same of the second surface.
    """

    there: np.ndarray
    back: np.ndarray
    there_area: np.ndarray
    back_area: np.ndarray


def hd95(voxels: Distances) -> float:
    """95th percentile of the distances in mm: the maximum of the two directions.

    Source: Maier-Hein et al. 2024, doi:10.1038/s41592-023-02151-z; linear percentiles, as in MONAI.
    """
    return float(max(np.percentile(voxels.there, 95), np.percentile(voxels.back, 95)))


def average_distance(voxels: Distances) -> float:
    """Average symmetric surface distance in mm: the mean over the boundary voxels of both masks.

    Source: Heimann et al. 2009, doi:10.1109/TMI.2009.2013851.
    """
    return float(np.concatenate([voxels.there, voxels.back]).mean())


def surface_dice(elements: Distances, tolerance_mm: float) -> float:
    """Share of both surfaces' area that lies at most `tolerance_mm` from the other surface; 0 to 1.

    Source: Nikolov et al. 2018, arXiv:1809.04430.
    """
    allowed_mm = tolerance_mm * (1 + 1e-6)  # a distance equal to the tolerance counts in spite of rounding
    near_there = elements.there_area[elements.there <= allowed_mm].sum()
    near_back = elements.back_area[elements.back <= allowed_mm].sum()
    total_area = elements.there_area.sum() + elements.back_area.sum()
    return float((near_there + near_back) / total_area)


def voxel_distances(first: np.ndarray, second: np.ndarray, spacing_mm: Sequence[float]) -> Distances:
    """Distances between the boundary voxels of two masks. Outside of the array is background.

    Shape: two bool arrays of 2 or 3 axes, neither empty; spacing for each axis.
    """
    first_boundary = _boundary(first)
    second_boundary = _boundary(second)
    return Distances(
        there=_nearest_distances(first_boundary, second_boundary, spacing_mm),
        back=_nearest_distances(second_boundary, first_boundary, spacing_mm),
        there_area=np.ones(int(first_boundary.sum())),
        back_area=np.ones(int(second_boundary.sum())),
    )


def element_distances(first: np.ndarray, second: np.ndarray, spacing_mm: Sequence[float]) -> Distances:
    """Distances between the surface elements of two masks, at voxel corners. Shape: as `voxel_distances`.

    The weight of an element is the area of the marching-cubes triangles in the 2 x 2 (x 2) voxels around it.
    """
    # MONAI's table: the code of the voxels around a corner -> area; weights: the bit of each of these voxels
    table, weights = get_code_to_measure_table(tuple(spacing_mm))
    areas = np.asarray(table)
    code_bits = np.asarray(weights)[0, 0].astype(np.uint8)
    first_codes = _corner_codes(first, code_bits)
    second_codes = _corner_codes(second, code_bits)
    # a corner is on the surface if the voxels around it are neither all background nor all foreground
    all_foreground = len(areas) - 1
    first_surface = (first_codes != 0) & (first_codes != all_foreground)
    second_surface = (second_codes != 0) & (second_codes != all_foreground)
    return Distances(
        there=_nearest_distances(first_surface, second_surface, spacing_mm),
        back=_nearest_distances(second_surface, first_surface, spacing_mm),
        there_area=areas[first_codes[first_surface]].astype(float),
        back_area=areas[second_codes[second_surface]].astype(float),
    )


def _boundary(mask: np.ndarray) -> np.ndarray:
    """The voxels of a mask that share a face with the background."""
    # shifted[1, 1, 1] is the mask itself; padding makes the outside background
    shifted = sliding_window_view(np.pad(mask, 1), mask.shape)
    inner = mask.copy()
    for shift in np.argwhere(generate_binary_structure(mask.ndim, 1)):
        inner &= shifted[tuple(shift)]
    boundary: np.ndarray = mask & ~inner
    return boundary


def _corner_codes(mask: np.ndarray, code_bits: np.ndarray) -> np.ndarray:
    """A bit code of the voxels around each corner. Shape: n voxels -> n + 1 corners per axis."""
    # each view is the mask shifted by one voxel along some of the axes
    codes = np.zeros([n + 1 for n in mask.shape], np.uint8)
    shifted = sliding_window_view(np.pad(mask, 1).astype(np.uint8), codes.shape)
    for shift in np.ndindex(code_bits.shape):
        codes += shifted[shift] * code_bits[shift]
    return codes


def _nearest_distances(here: np.ndarray, there: np.ndarray, spacing_mm: Sequence[float]) -> np.ndarray:
    """Euclidean distance in mm from each voxel of `here` to the nearest of `there`, in array order."""
    distances = np.zeros(int(here.sum()))
    is_apart = ~there[here]  # shared voxels are 0 mm apart: most of a good prediction
    if is_apart.any():
        there_mm = np.argwhere(there) * spacing_mm
        here_mm = np.argwhere(here)[is_apart] * spacing_mm
        # builds faster so: split at midpoints, without shrinking the boxes
        tree = KDTree(there_mm, leafsize=32, balanced_tree=False, compact_nodes=False)
        distances[is_apart] = tree.query(here_mm)[0]
    return distances


def diagonal_mm(shape: Sequence[int], spacing_mm: Sequence[float]) -> float:
    """The diagonal of an image: the longest possible distance in it."""
    sides_mm = [n * mm for n, mm in zip(shape, spacing_mm, strict=True)]
    origin = [0.0] * len(shape)
    return math.dist(origin, sides_mm)
