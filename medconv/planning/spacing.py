"""Target spacing, slice axis for 2D networks, image sizes after resampling; and a coarser grid.

A patch on the images' own grid may see too little of them. nnU-Net trains a second, low-resolution network in
that case (Isensee et al. 2021, doi:10.1038/s41592-020-01008-z). With little time one network has to do: it
sees more on a coarser grid, which must still hold the thinnest structure.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any

import numpy as np

from medconv.data.preprocessing.fingerprint import Fingerprint
from medconv.planning.topology import EVEN
from medconv.utils.errors import Argument, ArgumentError

_THICK = 3  # anisotropic: slices this many times thicker than other voxels, and this many times fewer
_DECIMALS = 4  # of a spacing in mm
_FEWEST_SLICES = 4  # with fewer, a 3D kernel sees mostly padding


def target_spacing(fingerprint: Fingerprint) -> tuple[float, ...]:
    """The median spacing, mm; across thick slices the 10th percentile, for the detail of thinner ones.

    Thick: over 3 times the other axes' spacing, below a third of their voxels; it stays the coarsest axis.
    Source: Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """
    spacings = np.array(fingerprint.spacings_mm)
    target = np.median(spacings, axis=0)
    axis = thick_axis(fingerprint)
    if axis is not None:
        thin_mm = float(np.percentile(spacings[:, axis], 10))
        # thin slices of a few cases must not make the grid finer across slices than within them
        in_plane_mm = np.delete(target, axis).max()
        target[axis] = max(thin_mm, in_plane_mm)
    # to 4 decimals, or 4 digits where that is more: microscopes have spacings of 0.00025 mm
    digits = [max(_DECIMALS, _DECIMALS - 1 - math.floor(math.log10(mm))) for mm in target]
    return tuple(round(float(mm), count) for mm, count in zip(target, digits, strict=True))


def thick_axis(fingerprint: Fingerprint) -> int | None:
    """The axis across slices that are thicker than three times the longer edge of their voxels in the slice.

    None if voxels are closer to cubes, or the slices are not a third as many as the voxels of other axes.
    """
    spacing = np.median(fingerprint.spacings_mm, axis=0)
    shape = np.median(fingerprint.shapes, axis=0)
    axis = int(np.argmax(spacing))
    is_thick = spacing[axis] > _THICK * np.delete(spacing, axis).max()
    is_short = shape[axis] * _THICK < np.delete(shape, axis).min()
    return axis if is_thick and is_short else None


def slice_axis(fingerprint: Fingerprint, spatial_dims: int | None, axis: int | None = None) -> int | None:
    """The axis across the slices that a network takes from volumes: the last of those of coarsest spacing.

    Args:
        spatial_dims: of the network; None takes slices of volumes of fewer than 4.
        axis: this one instead.
    Returns:
        None where the network takes the images as they are.
    Raises:
        ValueError: the data has no such dimensions.
    Source: as nnU-Net's 2d configuration; Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """
    if spatial_dims == 3 and fingerprint.spatial_dims == 2:
        raise ArgumentError("spatial_dims", "=3 needs volumes, these images have one slice; take 2 or null")
    takes_images = fingerprint.spatial_dims == 2 or spatial_dims == 3
    is_usable = axis in (0, 1, 2) and spatial_dims == 2 and not takes_images
    if axis is not None and not is_usable:
        raise ArgumentError(
            "slice_axis", " must be 0, 1 or 2, with ", Argument("spatial_dims"), f"=2 and volumes, got {axis}"
        )
    if takes_images or axis is not None:
        return axis
    spacing = target_spacing(fingerprint)
    # of equal spacings the last axis (superior), across which most scanners take slices
    coarsest_axis = max(range(3), key=lambda index: (spacing[index], index))
    if spatial_dims == 2:
        return coarsest_axis
    median_slices = np.median([shape[coarsest_axis] for shape in fingerprint.shapes])
    return coarsest_axis if median_slices < _FEWEST_SLICES else None


def across(fingerprint: Fingerprint, axis: int) -> Fingerprint:
    """The fingerprint of the slices across an axis, to plan a 2D network."""

    def in_plane(rows: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
        return tuple(row[:axis] + row[axis + 1 :] for row in rows)

    return replace(
        fingerprint,
        spatial_dims=2,
        shapes=in_plane(fingerprint.shapes),
        spacings_mm=in_plane(fingerprint.spacings_mm),
        thickness_mm=in_plane(fingerprint.thickness_mm),
    )


def median_shape(fingerprint: Fingerprint, spacing: Sequence[float]) -> tuple[int, ...]:
    """Voxels of the median image on a grid of this spacing."""
    shapes = (np.array(fingerprint.shapes) * np.array(fingerprint.spacings_mm) / np.array(spacing)).round()
    return tuple(max(1, round(float(edge))) for edge in np.median(shapes, axis=0))


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
