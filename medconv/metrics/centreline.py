"""Centrelines of thin structures, such as vessels, and the share of them that is right.

Source: Shit et al. 2021, arXiv:2003.07311 (clDice); Lee et al. 1994, doi:10.1006/cgip.1994.1042 (skeletons of
volumes); Zhang & Suen 1984, doi:10.1145/357994.358023 (of planes).
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
from scipy.ndimage import distance_transform_edt

from medconv.utils.optional_imports import needed

_MARGIN = 2.0  # voxels by which a line may end before its structure does


def check_installed() -> None:
    """Raises: ValueError: the package that thins masks is not installed."""
    needed("skimage", "centreline", "measuring centrelines")


def skeleton(mask: np.ndarray) -> np.ndarray:
    """The centreline, one voxel wide; what lies beyond the array is background.

    scikit-image deletes parts of volumes whose width is even, up to whole vessels (its issue 3757). They are
    recognised by their distance from the line, and thinned again on a grid on which all widths are odd.
    Shape: (X, Y) or (X, Y, Z), bool -> the same.
    """
    from skimage.morphology import skeletonize

    line: np.ndarray = skeletonize(mask)
    deleted = _deleted(mask, line)
    if deleted.any():
        fine_line = skeletonize(_with_odd_widths(mask))
        line |= _on_coarse_grid(fine_line, mask.shape) & deleted
    return line


def _deleted(mask: np.ndarray, line: np.ndarray) -> np.ndarray:
    """The voxels of a mask that are farther from the line than the mask is thick there."""
    if not line.any():
        return mask
    # half of the mask's width at each voxel, in voxels; beyond the array is background
    radius = distance_transform_edt(np.pad(mask, 1))[(slice(1, -1),) * mask.ndim]
    distance, nearest = distance_transform_edt(~line, return_indices=True)
    # a voxel is about as far from its own line as that line is from the surface, or less
    deleted: np.ndarray = mask & (distance > radius[tuple(nearest)] + _MARGIN)
    return deleted


def _with_odd_widths(mask: np.ndarray) -> np.ndarray:
    """A mask on a grid of half the spacing, one fine voxel wider: n voxels become 2 n + 1."""
    doubled = mask
    for axis in range(mask.ndim):
        doubled = doubled.repeat(2, axis)
    wider = np.zeros([voxels + 1 for voxels in doubled.shape], bool)
    # each fine voxel also fills its next neighbour along every axis
    for offsets in product((0, 1), repeat=mask.ndim):
        shifted = [slice(start, start + voxels) for start, voxels in zip(offsets, doubled.shape, strict=True)]
        wider[tuple(shifted)] |= doubled
    return wider


def _on_coarse_grid(fine_line: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The line on the grid that `_with_odd_widths` had. Args: shape: of that grid."""
    line = np.zeros(shape, bool)
    voxels = np.argwhere(fine_line) // 2
    # the fine voxel that was added at the far end belongs to the last coarse one
    line[tuple(np.minimum(voxels, np.array(shape) - 1).T)] = True
    return line


def cldice(
    prediction: np.ndarray, reference: np.ndarray, predicted_line: np.ndarray, reference_line: np.ndarray
) -> float | None:
    """The harmonic mean of two shares: of each centreline, how much lies in the other mask.

    Shape: masks of one shape; the lines are their skeletons.
    Returns: None without a centreline.
    """
    if not (predicted_line.any() and reference_line.any()):
        return None
    precision = float(reference[predicted_line].mean())
    sensitivity = float(prediction[reference_line].mean())
    if not precision + sensitivity:
        return 0.0
    return 2 * precision * sensitivity / (precision + sensitivity)
