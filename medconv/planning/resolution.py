"""A coarser grid, where a patch on the images' own grid would see too little of them.

nnU-Net trains a second, low-resolution network in that case (Isensee et al. 2021,
doi:10.1038/s41592-020-01008-z). With little time one network has to do: it sees more on a coarser grid, which
must still hold the thinnest structure.
"""

from collections.abc import Sequence
from math import inf, prod

from medconv.planning.topology import EVEN

# Voxels across the mean thickness of the thinnest structure that a coarser grid keeps; a ball then has half
# as many again. From 6 voxels to 5 or 4, generated vessels and a heart's wall lose up to 1.3 points of Dice
# (experiments/planning.md), so fewer are allowed only as long as a patch sees very little.
_ENOUGH_VOXELS = 6
_FEWEST_VOXELS = 4
_VERY_SMALL_VIEW = 0.125  # of the median image's voxels: half of each edge of a volume
SMALL_VIEW = 0.25  # with less, nnU-Net trains a low-resolution network, too
_STEP = 1.05  # factor between the spacings that are tried
_DIGITS = 3  # of a coarser spacing


def view_share(patch: Sequence[int], median: Sequence[int]) -> float:
    """The share of the median image's voxels that a patch covers, 0 to 1."""
    edges = zip(patch, median, strict=True)
    return prod(min(1.0, patch_edge / median_edge) for patch_edge, median_edge in edges)


def voxels_to_keep(view: float) -> int:
    """Voxels across the thinnest structure, on a grid whose patch sees the share `view` of the image."""
    return _FEWEST_VOXELS if view < _VERY_SMALL_VIEW else _ENOUGH_VOXELS


def voxels_kept(
    spacing_mm: Sequence[float], native_mm: Sequence[float], thickness_mm: Sequence[Sequence[float]]
) -> float | None:
    """Voxels across the thinnest structure, along the axes that are coarser than those of the images.

    None without such an axis or structure. Args: thickness_mm: as of `coarser`.
    """
    axes = [axis for axis, mm in enumerate(native_mm) if spacing_mm[axis] > mm]
    return min(
        (row[axis] / spacing_mm[axis] for row in thickness_mm for axis in axes if row[axis] > 0), default=None
    )


def coarser(
    spacing_mm: Sequence[float], thickness_mm: Sequence[Sequence[float]], view: float
) -> tuple[float, ...] | None:
    """The next coarser spacing that keeps the thinnest structure; None if there is none.

    The finest axes, and those less than twice as coarse, become coarser together, so thick slices stay as
    they are until the other axes are nearly as coarse. An axis along which a structure would have too few
    voxels stays, and the others become as coarse as it.

    Args:
        spacing_mm: of the present grid, whose patch sees the share `view` of the median image.
        thickness_mm: per foreground class, along each axis; 0 where a class is absent.
    """
    num_voxels = voxels_to_keep(view)
    finest = min(spacing_mm)
    # 3 digits: 1.07, not 1.071875
    next_mm = [float(f"{mm * _STEP:.{_DIGITS}g}") if mm < EVEN * finest else mm for mm in spacing_mm]
    coarsest = inf
    for axis, (mm, new_mm) in enumerate(zip(spacing_mm, next_mm, strict=True)):
        thinnest = min((row[axis] for row in thickness_mm if row[axis] > 0), default=inf)
        if new_mm > mm and thinnest < num_voxels * new_mm:
            coarsest = min(coarsest, mm)
    coarsened = tuple(
        new_mm if new_mm <= coarsest else mm for mm, new_mm in zip(spacing_mm, next_mm, strict=True)
    )
    return None if coarsened == tuple(spacing_mm) else coarsened
