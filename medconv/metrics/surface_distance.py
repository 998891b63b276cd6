"""Distances between the surfaces of two binary masks, in mm, and what they are condensed to.

Two definitions of a surface, as in the literature and in MONAI. HD95 and the average distance take the
boundary voxels: those of the mask that share a face with what is not in it. The surface Dice takes the
elements between voxel centres, each with its area, since counting voxels would weigh a slanted surface, and
one across thick slices, too little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from monai.metrics.utils import get_code_to_measure_table
from scipy.spatial import KDTree


@dataclass(frozen=True)
class Distances:
    """From every place of each of two surfaces to the nearest place of the other one.

    Args: there, back: mm; from the first mask's surface to the second's, and from the second's to the
    first's.
        there_area, back_area: what each place stands for: mm^2 (mm in 2D), or 1 for a voxel.
    """

    there: np.ndarray
    back: np.ndarray
    there_area: np.ndarray
    back_area: np.ndarray


def hd95(voxels: Distances) -> float:
    """95th percentile of the distances, in mm: the larger one of the two directions.

    Source: Maier-Hein et al. 2024, doi:10.1038/s41592-023-02151-z; percentiles interpolate linearly, as in
    MONAI.
    """
    return float(max(np.percentile(voxels.there, 95), np.percentile(voxels.back, 95)))


def average_distance(voxels: Distances) -> float:
    """Average symmetric surface distance in mm: the mean over the boundary voxels of both masks, taken
    together.

    Source: Heimann et al. 2009, doi:10.1109/TMI.2009.2013851.
    """
    return float(np.concatenate([voxels.there, voxels.back]).mean())


def surface_dice(elements: Distances, tolerance_mm: float) -> float:
    """Share of both surfaces' area that lies at most `tolerance_mm` from the other surface; 0 to 1.

    Source: Nikolov et al. 2018, arXiv:1809.04430.
    """
    allowed = tolerance_mm * (
        1 + 1e-6
    )  # a distance that is as long as the tolerance counts, whatever its last bit
    near = (
        elements.there_area[elements.there <= allowed].sum()
        + elements.back_area[elements.back <= allowed].sum()
    )
    return float(near / (elements.there_area.sum() + elements.back_area.sum()))


def voxel_distances(first: np.ndarray, second: np.ndarray, spacing_mm: Sequence[float]) -> Distances:
    """Between the boundary voxels of two masks. What lies beyond the array's edge is in neither mask.

    Shape: two bool arrays of 2 or 3 axes, neither empty; spacing for each axis.
    """
    a, b = _boundary(first), _boundary(second)
    areas = [np.ones(int(surface.sum())) for surface in (a, b)]
    return Distances(_nearest(a, b, spacing_mm), _nearest(b, a, spacing_mm), *areas)


def element_distances(first: np.ndarray, second: np.ndarray, spacing_mm: Sequence[float]) -> Distances:
    """Between the surface elements of two masks, which lie at the corners of voxels. As `voxel_distances`.

    Each element stands for the area of the marching-cubes triangles within the 2 x 2 (x 2) voxels around its
    corner.
    """
    table, weights = (np.asarray(part) for part in get_code_to_measure_table(tuple(spacing_mm)))
    codes = [_codes(mask, weights[0, 0].astype(np.uint8)) for mask in (first, second)]
    a, b = ((code != 0) & (code != len(table) - 1) for code in codes)
    areas = [table[code[surface]].astype(float) for code, surface in zip(codes, (a, b), strict=True)]
    return Distances(_nearest(a, b, spacing_mm), _nearest(b, a, spacing_mm), *areas)


def _boundary(mask: np.ndarray) -> np.ndarray:
    padded = np.pad(mask, 1)
    inner = mask.copy()
    for axis in range(mask.ndim):
        for start in (0, 2):
            inner &= padded[tuple(_shifted(n, start if a == axis else 1) for a, n in enumerate(mask.shape))]
    return mask & ~inner


def _codes(mask: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Which of the voxels around each corner are in the mask, as a number. Shape: n voxels -> n + 1
    corners per axis.
    """
    padded = np.pad(mask, 1).astype(np.uint8)
    codes = np.zeros([n + 1 for n in mask.shape], np.uint8)
    for place in np.ndindex(weights.shape):
        codes += (
            padded[tuple(_shifted(n + 1, start) for n, start in zip(mask.shape, place, strict=True))]
            * weights[place]
        )
    return codes


def _shifted(length: int, start: int) -> slice:
    return slice(start, start + length)


def _nearest(here: np.ndarray, there: np.ndarray, spacing_mm: Sequence[float]) -> np.ndarray:
    """Euclidean distance in mm from each place of `here` to the nearest one of `there`, in the array's
    order.
    """
    distances = np.zeros(int(here.sum()))
    apart = ~there[here]  # what both surfaces share is 0 mm away: most of a good prediction
    if apart.any():
        tree = KDTree(np.argwhere(there) * spacing_mm, leafsize=32, balanced_tree=False, compact_nodes=False)
        distances[apart] = tree.query(np.argwhere(here)[apart] * spacing_mm)[0]
    return distances


def diagonal_mm(shape: Sequence[int], spacing_mm: Sequence[float]) -> float:
    """The length of an image from corner to corner: no distance within it is longer."""
    return math.dist([0.0] * len(shape), [n * mm for n, mm in zip(shape, spacing_mm, strict=True)])
