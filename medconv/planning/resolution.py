"""A coarser grid, where a patch on the images' own grid would see too little of them.

nnU-Net trains a second, low-resolution network in that case (Isensee et al. 2021,
doi:10.1038/s41592-020-01008-z). With little time one network has to do: it sees more on a coarser grid, which
must still hold the thinnest structure.
"""

from collections.abc import Sequence
from math import prod

from medconv.planning.topology import EVEN

# Voxels that are left across the mean thickness of the thinnest structure. A ball then has 6 across.
FEWEST_VOXELS = 4
_STEP = 1.05  # factor between the spacings that are tried
_DIGITS = 3  # of a coarser spacing


def view_share(patch: Sequence[int], median: Sequence[int]) -> float:
    """The share of the median image's voxels that a patch covers, 0 to 1."""
    return prod(min(1.0, n / whole) for n, whole in zip(patch, median, strict=True))


def keeps_structures(spacing_mm: Sequence[float], thickness_mm: Sequence[Sequence[float]]) -> bool:
    """Whether the thinnest structure keeps `FEWEST_VOXELS` voxels along every axis.

    Args:
        thickness_mm: per foreground class, along each axis; 0 where a class is absent.
    """
    present = [row for row in thickness_mm if all(row)]
    return all(
        mm >= FEWEST_VOXELS * voxel_mm
        for row in present
        for mm, voxel_mm in zip(row, spacing_mm, strict=True)
    )


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
