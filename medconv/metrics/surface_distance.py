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

    Args: there, back: mm; from the first mask's surface to the second's, and back.
        there_area, back_area: weight of each point: mm^2 (mm in 2D), or 1 for a voxel.
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
    allowed = tolerance_mm * (1 + 1e-6)  # a distance equal to the tolerance counts in spite of rounding
    both = ((elements.there, elements.there_area), (elements.back, elements.back_area))
    near = sum(areas[distances <= allowed].sum() for distances, areas in both)
    return float(near / sum(areas.sum() for _, areas in both))


def voxel_distances(first: np.ndarray, second: np.ndarray, spacing_mm: Sequence[float]) -> Distances:
    """Distances between the boundary voxels of two masks. Outside of the array is background.

    Shape: two bool arrays of 2 or 3 axes, neither empty; spacing for each axis.
    """
    a, b = _boundary(first), _boundary(second)
    areas = [np.ones(int(surface.sum())) for surface in (a, b)]
    return Distances(_nearest(a, b, spacing_mm), _nearest(b, a, spacing_mm), *areas)


def element_distances(first: np.ndarray, second: np.ndarray, spacing_mm: Sequence[float]) -> Distances:
    """Distances between the surface elements of two masks, at voxel corners. Shape: as `voxel_distances`.

    The weight of an element is the area of the marching-cubes triangles in the 2 x 2 (x 2) voxels around it.
    """
    table, weights = (np.asarray(part) for part in get_code_to_measure_table(tuple(spacing_mm)))
    codes = [_codes(mask, weights[0, 0].astype(np.uint8)) for mask in (first, second)]
    a, b = ((code != 0) & (code != len(table) - 1) for code in codes)
    areas = [table[code[surface]].astype(float) for code, surface in zip(codes, (a, b), strict=True)]
    return Distances(_nearest(a, b, spacing_mm), _nearest(b, a, spacing_mm), *areas)


def _boundary(mask: np.ndarray) -> np.ndarray:
    shifted, inner = sliding_window_view(np.pad(mask, 1), mask.shape), mask.copy()
    for shift in np.argwhere(generate_binary_structure(mask.ndim, 1)):
        inner &= shifted[tuple(shift)]
    boundary: np.ndarray = mask & ~inner
    return boundary


def _codes(mask: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """A bit code of the voxels around each corner. Shape: n voxels -> n + 1 corners per axis."""
    codes = np.zeros([n + 1 for n in mask.shape], np.uint8)
    shifted = sliding_window_view(np.pad(mask, 1).astype(np.uint8), codes.shape)
    for shift in np.ndindex(weights.shape):
        codes += shifted[shift] * weights[shift]
    return codes


def _nearest(here: np.ndarray, there: np.ndarray, spacing_mm: Sequence[float]) -> np.ndarray:
    """Euclidean distance in mm from each voxel of `here` to the nearest of `there`, in array order."""
    distances = np.zeros(int(here.sum()))
    apart = ~there[here]  # shared voxels are 0 mm apart: most of a good prediction
    if apart.any():
        tree = KDTree(np.argwhere(there) * spacing_mm, leafsize=32, balanced_tree=False, compact_nodes=False)
        distances[apart] = tree.query(np.argwhere(here)[apart] * spacing_mm)[0]
    return distances


def diagonal_mm(shape: Sequence[int], spacing_mm: Sequence[float]) -> float:
    """The diagonal of an image: the longest possible distance in it."""
    return math.dist([0.0] * len(shape), [n * mm for n, mm in zip(shape, spacing_mm, strict=True)])
