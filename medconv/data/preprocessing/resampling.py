"""Spline resampling of a volume to another shape, one axis after the other.

Along an axis of n voxels, spline filter, extension at the edges and interpolation are together one matrix,
with few entries beside its diagonal that are not 0. Three matrix products equal `scipy.ndimage.zoom` up to
float32 rounding, in a tenth of the time; an axis that keeps its length costs nothing.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, product
from math import prod
from typing import NamedTuple

import numpy as np
from scipy import ndimage

_CUBIC = 3  # order of the spline
LINEAR = 1
_NEGLIGIBLE = 1e-9  # smaller weights become 0: float32 denormals are slow
_ANISOTROPIC = 3  # times as thick as other voxels: nnU-Net resamples across such slices by the nearest
_EQUAL = 1e-5  # relative; spacings that differ by less are equal
_ROWS_AT_ONCE = 32  # of a matrix; more multiply more zeros, fewer leave the library less to reuse
_VOXELS_AT_ONCE = 2**19  # of a label map, so that they stay in the cache
_TIE = 1e-6  # if the weights of two classes differ less, the lower class wins


def zoom(volume: np.ndarray, shape: Sequence[int], smooths: bool = False, order: int = _CUBIC) -> np.ndarray:
    """Splines; the outer edges of the first and last voxels stay in place.

    Shape: (*spatial) -> `shape`, float32.
    Args:
        smooths: along axes that get fewer voxels, before that, against aliasing.
        order: of the splines; `LINEAR` ones keep values within their range.
    Source: the width of the Gaussian is scikit-image's, `transform.resize(anti_aliasing=True)`.
    """
    growth = [new / old for old, new in zip(volume.shape, shape, strict=True)]
    volume = volume.astype(np.float32, copy=False)
    for axis in sorted(range(volume.ndim), key=growth.__getitem__):  # axes that shrink the volume first
        if volume.shape[axis] != shape[axis]:
            volume = _multiply(volume, axis, _matrix(volume.shape[axis], shape[axis], order, smooths))
    return volume


def nearest_axis(spacing_mm: Sequence[float], target_mm: Sequence[float]) -> int | None:
    """The axis across thick slices, of which nnU-Net takes the nearest; None: it interpolates along all axes.

    Source: nnU-Net v2's `determine_do_sep_z_and_axis`.
    """
    for mm in (spacing_mm, target_mm):  # before and after: the first that is anisotropic decides
        if max(mm) > _ANISOTROPIC * min(mm):
            coarsest = [axis for axis, size in enumerate(mm) if max(mm) < size * (1 + _EQUAL)]
            return coarsest[0] if len(coarsest) == 1 else None
    return None


def nearest(voxels: int, new_voxels: int) -> np.ndarray:
    """Indices that resample an axis to `new_voxels` by the nearest voxel, the upper one of two."""
    # Of the new voxels' centres, counted in old voxels from the centre of the first.
    positions = voxels / new_voxels * (np.arange(new_voxels) + 0.5) - 0.5
    indices: np.ndarray = np.floor(positions + 0.5)
    indices = indices.clip(0, voxels - 1)
    return indices.astype(np.int64)


def zoom_within_range(volume: np.ndarray, shape: Sequence[int], nearest_axis: int | None) -> np.ndarray:
    """`zoom` whose values stay between lowest and highest of the volume; with `nearest_axis`, slice by slice,
    and across that axis the nearest slices.

    Source: nnU-Net v2's `resample_data_or_seg`, order 3 in the plane and 0 across.
    """
    plane_axes = tuple(axis for axis in range(volume.ndim) if axis != nearest_axis)
    low = volume.min(axis=plane_axes, keepdims=True)
    high = volume.max(axis=plane_axes, keepdims=True)
    if nearest_axis is None:
        return zoom(volume, shape).clip(low, high)
    num_slices = volume.shape[nearest_axis]
    plane_shape = list(shape)
    plane_shape[nearest_axis] = num_slices
    in_plane = zoom(volume, plane_shape).clip(low, high)
    return in_plane.take(nearest(num_slices, shape[nearest_axis]), nearest_axis)


class Neighbours(NamedTuple):
    """The two voxels between which each new voxel of an axis lies.

    Shape: each (new_voxels,).
    """

    lower: np.ndarray
    upper: np.ndarray
    upper_weight: np.ndarray


def neighbours(voxels: int, new_voxels: int) -> Neighbours:
    """As torch's `align_corners=False`: the outer edges stay in place, and nothing is extrapolated."""
    centres = np.arange(new_voxels) + 0.5
    positions = (centres * (voxels / new_voxels) - 0.5).clip(0, voxels - 1)
    lower = positions.astype(np.int64)
    upper = np.minimum(lower + 1, voxels - 1)
    return Neighbours(lower, upper, (positions - lower).astype(np.float32))


def zoom_label(label: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The class with the largest weight after linear interpolation of each; no new values appear.

    Most new voxels lie between voxels of one class, which is then theirs. The others are few, so the time
    does not grow with the number of classes.

    Shape: (*spatial) integers -> `shape`, of the same type.
    """
    if tuple(shape) == label.shape:
        return label
    of_axes = [neighbours(voxels, new_voxels) for voxels, new_voxels in zip(label.shape, shape, strict=True)]
    resampled = np.empty(tuple(shape), label.dtype)
    num_rows = max(1, _VOXELS_AT_ONCE // prod(shape[1:]))
    for first in range(0, shape[0], num_rows):
        rows = slice(first, first + num_rows)
        of_rows = [Neighbours(*(array[rows] for array in of_axes[0])), *of_axes[1:]]
        zoomed = label
        is_one_class = np.True_  # whether all neighbours along the axes so far have the class in `zoomed`
        for axis, along in enumerate(of_rows):
            lower = zoomed.take(along.lower, axis)
            if not along.upper_weight.any():
                is_one_class = is_one_class.take(along.lower, axis) if is_one_class.ndim else is_one_class
            else:
                equal = lower == zoomed.take(along.upper, axis)
                if is_one_class.ndim:
                    equal &= is_one_class.take(along.lower, axis)
                    equal &= is_one_class.take(along.upper, axis)
                is_one_class = equal
            zoomed = lower
        mixed = np.nonzero(~np.broadcast_to(is_one_class, zoomed.shape))
        zoomed[mixed] = _heaviest_class(label, of_rows, mixed)
        resampled[rows] = zoomed
    return resampled


def _heaviest_class(
    label: np.ndarray, of_axes: Sequence[Neighbours], voxels: Sequence[np.ndarray]
) -> np.ndarray:
    """The class with the largest weight among all neighbours; of equal ones the lowest.

    Args:
        voxels: of the new grid, one array of indices per axis.
    """
    corners = []  # classes
    weights = []
    for is_upper in product((False, True), repeat=label.ndim):
        indices = []
        weight = np.ones(len(voxels[0]), np.float32)
        for along, upper, new_voxel in zip(of_axes, is_upper, voxels, strict=True):
            indices.append((along.upper if upper else along.lower)[new_voxel])
            upper_weight = along.upper_weight[new_voxel]
            weight *= upper_weight if upper else 1 - upper_weight
        corners.append(label[tuple(indices)])
        weights.append(weight)
    class_weights = [weight.copy() for weight in weights]
    for one, other in combinations(range(len(corners)), 2):
        is_same = corners[one] == corners[other]
        class_weights[one] += weights[other] * is_same
        class_weights[other] += weights[one] * is_same
    needed = np.max(class_weights, axis=0) - _TIE
    highest = np.iinfo(label.dtype).max
    candidates = [
        np.where(weight >= needed, corner, highest)
        for corner, weight in zip(corners, class_weights, strict=True)
    ]
    heaviest: np.ndarray = np.min(candidates, axis=0)
    return heaviest


def _multiply(volume: np.ndarray, axis: int, matrix: np.ndarray) -> np.ndarray:
    """Shape: matrix (new_voxels, voxels along `axis`)."""
    before = volume.shape[:axis]
    after = volume.shape[axis + 1 :]
    multiplied = np.empty((*before, len(matrix), *after), np.float32)
    if after:  # (before, voxels, after): a matrix product for each index before
        source = volume.reshape(prod(before), matrix.shape[1], prod(after))
        target = multiplied.reshape(prod(before), len(matrix), prod(after))
    for first in range(0, len(matrix), _ROWS_AT_ONCE):
        # Some rows at a time, and the columns in which they are not 0: interpolation reaches few voxels
        rows = slice(first, first + _ROWS_AT_ONCE)
        reached = np.flatnonzero(matrix[rows].any(0))
        columns = slice(int(reached[0]), int(reached[-1]) + 1) if len(reached) else slice(0, 0)
        if after:
            np.matmul(matrix[rows, columns], source[:, columns], out=target[:, rows])
        else:
            np.matmul(volume[..., columns], matrix[rows, columns].T, out=multiplied[..., rows])
    return multiplied


@lru_cache(64)
def _matrix(voxels: int, new_voxels: int, order: int, smooths: bool) -> np.ndarray:
    """The float32 matrix of interpolation along one axis.

    Shape: (new_voxels, voxels).
    """
    # Column i is the interpolation of a volume that is 1 at voxel i.
    units = np.eye(voxels)
    if smooths and voxels > new_voxels:
        sigma = (voxels / new_voxels - 1) / 2
        units = ndimage.gaussian_filter1d(units, sigma, axis=0, mode="nearest")
    weights: np.ndarray = ndimage.zoom(
        units, (new_voxels / voxels, 1), order=order, mode="nearest", grid_mode=True
    )
    weights[np.abs(weights) < _NEGLIGIBLE] = 0
    weights = weights.astype(np.float32)
    weights.flags.writeable = False  # it is shared
    return weights
