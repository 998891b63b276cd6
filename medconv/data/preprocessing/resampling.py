"""Spline resampling of a volume to another shape, one axis after the other.

Along an axis of n voxels, spline filter, extension at the edges and interpolation are together one matrix.
Three matrix products equal `scipy.ndimage.zoom` up to float32 rounding, in a tenth of the time; an axis that
keeps its length costs nothing.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np
from scipy import ndimage

_NEGLIGIBLE = 1e-9  # smaller weights become 0: float32 denormals are slow
_ANISOTROPIC = 3  # times as thick as other voxels: nnU-Net resamples across such slices by the nearest
_EQUAL = 1e-5  # relative; spacings that differ by less are equal
_TIE = 1e-6  # if the weights of two classes differ less, the lower class wins
Box = tuple[slice, ...]


def zoom(volume: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Cubic splines; the outer edges of the first and last voxels stay in place.

    Shape: (*spatial) -> `shape`, float32.
    """
    matrices = [_matrix(n, new, 3) for n, new in zip(volume.shape, shape, strict=True)]
    return _multiply(volume.astype(np.float32), matrices)


def nearest_axis(spacing_mm: Sequence[float], target_mm: Sequence[float]) -> int | None:
    """The axis across thick slices, of which nnU-Net takes the nearest; None: it interpolates along all axes.

    Source: nnU-Net v2's `determine_do_sep_z_and_axis`.
    """
    for mm in (spacing_mm, target_mm):
        if max(mm) > _ANISOTROPIC * min(mm):
            coarsest = [axis for axis, size in enumerate(mm) if max(mm) < size * (1 + _EQUAL)]
            return coarsest[0] if len(coarsest) == 1 else None
    return None


def nearest(n: int, new: int) -> np.ndarray:
    """Indices that resample an axis of n voxels to `new` by the nearest voxel, the upper one of two."""
    places = n / new * (np.arange(new) + 0.5) - 0.5
    indices: np.ndarray = np.floor(places + 0.5).clip(0, n - 1).astype(np.int64)
    return indices


def zoom_within_range(volume: np.ndarray, shape: Sequence[int], nearest_axis: int | None) -> np.ndarray:
    """`zoom` whose values stay between lowest and highest of the volume; with `nearest_axis`, slice by slice,
    and across that axis the nearest slices.

    Source: nnU-Net v2's `resample_data_or_seg`, order 3 in the plane and 0 across.
    """
    plane = tuple(axis for axis in range(volume.ndim) if axis != nearest_axis)
    low, high = (limit(axis=plane, keepdims=True) for limit in (volume.min, volume.max))
    if nearest_axis is None:
        return zoom(volume, shape).clip(low, high)
    n = volume.shape[nearest_axis]
    in_plane = zoom(volume, [*shape[:nearest_axis], n, *shape[nearest_axis + 1 :]]).clip(low, high)
    return in_plane.take(nearest(n, shape[nearest_axis]), nearest_axis)


def zoom_label(label: np.ndarray, shape: Sequence[int], num_classes: int) -> np.ndarray:
    """The class with the largest weight after linear interpolation of each; no new values appear.

    Each class is interpolated only around its bounding box: elsewhere its weight is 0.
    Shape: (*spatial) integers -> `shape`, of the same type.
    """
    if tuple(shape) == label.shape:
        return label
    matrices = [_matrix(n, new, 1) for n, new in zip(label.shape, shape, strict=True)]
    out, most = np.zeros(tuple(shape), label.dtype), np.ones(tuple(shape), np.float32)
    found = enumerate(ndimage.find_objects(label, num_classes - 1), start=1)
    boxes = {value: box for value, box in found if box}
    if not boxes:
        return out
    foreground = _weights(label > 0, ndimage.find_objects((label > 0).view(np.uint8))[0], matrices)
    most[foreground[0]] -= foreground[1]  # the rest is the weight of the background
    for value, box in boxes.items():
        where, weights = foreground if len(boxes) == 1 else _weights(label == value, box, matrices)
        wins = weights > most[where] + _TIE
        out[where][wins] = value
        most[where][wins] = weights[wins]
    return out


def _weights(mask: np.ndarray, box: Box, matrices: Sequence[np.ndarray | None]) -> tuple[Box, np.ndarray]:
    """Interpolate a mask that is empty outside `box`. Returns: the box of the result, and weights."""
    places, parts = [], []
    for matrix, columns in zip(matrices, box, strict=True):
        if matrix is not None:
            rows = np.flatnonzero(matrix[:, columns].any(1))
            place = slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 0)
        places.append(columns if matrix is None else place)
        parts.append(None if matrix is None else matrix[place, columns])
    return tuple(places), _multiply(mask[box].astype(np.float32), parts)


def _multiply(volume: np.ndarray, matrices: Sequence[np.ndarray | None]) -> np.ndarray:
    """Apply a matrix along each axis, None for unchanged axes; those that shrink the volume first."""
    steps = [(len(m) / m.shape[1], axis, m) for axis, m in enumerate(matrices) if m is not None]
    for _, axis, matrix in sorted(steps, key=lambda step: step[:2]):
        if axis == volume.ndim - 1:
            volume = volume @ matrix.T
        else:
            before, n, after = volume.shape[:axis], volume.shape[axis], volume.shape[axis + 1 :]
            product = matrix @ volume.reshape(prod(before), n, prod(after))
            volume = product.reshape(*before, len(matrix), *after)
    return volume


@lru_cache(64)
def _matrix(n: int, new: int, order: int) -> np.ndarray | None:
    """The (new, n) float32 matrix of interpolation along one axis; None if nothing changes."""
    if n == new:
        return None
    units: np.ndarray = ndimage.zoom(np.eye(n), (new / n, 1), order=order, mode="nearest", grid_mode=True)
    units[np.abs(units) < _NEGLIGIBLE] = 0
    units = units.astype(np.float32)
    units.flags.writeable = False
    return units
