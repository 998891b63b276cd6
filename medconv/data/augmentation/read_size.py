"""How many voxels must be read around the centre of a patch that is rotated, scaled and shifted."""

from collections.abc import Sequence
from itertools import permutations
from math import ceil

import numpy as np


def rotated_half(
    patch_size: Sequence[int], spacing_mm: Sequence[float], rotation_deg: float, rotates: np.ndarray
) -> np.ndarray:
    """How far a rotation in one plane takes the corners of a patch from its centre.

    Shape: (axes,), in voxels.
    Args:
        rotation_deg: largest angle.
        rotates: the axes that may be rotated; bool.
    """
    half = np.array(patch_size) / 2
    spacing = np.array(spacing_mm)
    distance = half.copy()
    for axis, partner in permutations(np.flatnonzero(rotates), 2):
        partner_half = half[partner] * spacing[partner] / spacing[axis]  # in voxels of `axis`
        # The corner is farthest where it comes to lie on the axis.
        angle = min(np.deg2rad(rotation_deg), np.arctan2(partner_half, half[axis]))
        rotated = half[axis] * np.cos(angle) + partner_half * np.sin(angle)
        distance[axis] = max(distance[axis], rotated)
    return distance


def size_that_holds(patch_size: Sequence[int], distance: np.ndarray) -> tuple[int, ...]:
    """The smallest size with the centre of the patch that includes voxels this far from it."""
    size = []
    for voxels, far in zip(patch_size, distance, strict=True):
        # One voxel more to interpolate from; the same on both sides, so that the centre stays.
        margin = ceil(far + 1 - voxels / 2)
        size.append(int(voxels + 2 * margin))
    return tuple(size)
