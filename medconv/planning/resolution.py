"""A coarser grid, where a patch on the images' own grid would see too little of them.

nnU-Net trains a second, low-resolution network in that case (Isensee et al. 2021,
doi:10.1038/s41592-020-01008-z). With little time one network has to do: it sees more on a coarser grid, which
must still hold the thinnest structure.
"""

from collections.abc import Sequence
from math import prod

from medconv.planning.topology import EVEN

# Voxels across the mean thickness of the thinnest structure that a coarser grid keeps; a ball then has half
# as many again. From 6 voxels to 4, generated vessels lose 1.3 points of Dice (docs/log.md), so fewer are
# allowed only as long as a patch sees very little.
ENOUGH_VOXELS = 6
FEWEST_VOXELS = 4
VERY_SMALL_VIEW = 0.125  # of the median image's voxels: half of each edge of a volume
SMALL_VIEW = 0.25  # with less, nnU-Net trains a low-resolution network, too
_STEP = 1.05  # factor between the spacings that are tried
_DIGITS = 3  # of a coarser spacing


def view_share(patch: Sequence[int], median: Sequence[int]) -> float:
    """The share of the median image's voxels that a patch covers, 0 to 1."""
    edges = zip(patch, median, strict=True)
    return prod(min(1.0, patch_edge / median_edge) for patch_edge, median_edge in edges)


def coarser(spacing_mm: Sequence[float]) -> tuple[float, ...]:
    """The next coarser spacing.

    The finest axes, and those less than twice as coarse, become coarser together, so thick slices stay as
    they are until the other axes are nearly as coarse.
    """
    finest = min(spacing_mm)
    return tuple(
        float(f"{mm * _STEP:.{_DIGITS}g}") if mm < EVEN * finest else mm  # 3 digits: 1.07, not 1.071875
        for mm in spacing_mm
    )


def keeps_structures(
    coarser_mm: Sequence[float],
    spacing_mm: Sequence[float],
    thickness_mm: Sequence[Sequence[float]],
    view: float,
) -> bool:
    """Whether the thinnest structure keeps enough voxels along every axis that becomes coarser.

    Args:
        spacing_mm: of the present grid, whose patch sees the share `view` of the median image.
        thickness_mm: per foreground class, along each axis; 0 where a class is absent.
    """
    num_voxels = FEWEST_VOXELS if view < VERY_SMALL_VIEW else ENOUGH_VOXELS
    for axis, voxel_mm in enumerate(coarser_mm):
        thinnest = min((row[axis] for row in thickness_mm if row[axis] > 0), default=float("inf"))
        if voxel_mm > spacing_mm[axis] and thinnest < num_voxels * voxel_mm:
            return False
    return True
