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

_CUBIC = 3  # order of the spline
_LINEAR = 1
_NEGLIGIBLE = 1e-9  # smaller weights become 0: float32 denormals are slow
_ANISOTROPIC = 3  # times as thick as other voxels: nnU-Net resamples across such slices by the nearest
_EQUAL = 1e-5  # relative; spacings that differ by less are equal
_TIE = 1e-6  # if the weights of two classes differ less, the lower class wins
Box = tuple[slice, ...]


def zoom(volume: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Cubic splines; the outer edges of the first and last voxels stay in place.

    Shape: (*spatial) -> `shape`, float32.
    """
    matrices = _matrices(volume.shape, shape, _CUBIC)
    return _multiply(volume.astype(np.float32, copy=False), matrices)


def zoom_linear(volume: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Linear interpolation; values stay within their range. Shape: (*spatial) -> `shape`, float32."""
    matrices = _matrices(volume.shape, shape, _LINEAR)
    return _multiply(volume.astype(np.float32, copy=False), matrices)


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


def zoom_within_range(
    volume: np.ndarray,
    shape: Sequence[int],
    nearest_axis: int | None,
) -> np.ndarray:
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


def zoom_label(
    label: np.ndarray,
    shape: Sequence[int],
    num_classes: int,
) -> np.ndarray:
    """The class with the largest weight after linear interpolation of each; no new values appear.

    Each class is interpolated only around its bounding box: elsewhere its weight is 0.
    Shape: (*spatial) integers -> `shape`, of the same type.
    """
    if tuple(shape) == label.shape:
        return label
    resampled = np.zeros(tuple(shape), label.dtype)
    boxes = _class_boxes(label, num_classes)
    if not boxes:
        return resampled
    matrices = _matrices(label.shape, shape, _LINEAR)
    is_foreground = label > 0
    (foreground_box,) = ndimage.find_objects(is_foreground.view(np.uint8))
    foreground = _weights(is_foreground[foreground_box], foreground_box, matrices)
    # The largest weight so far: at first that of the background, which is what the foreground leaves.
    largest_weight = np.ones(tuple(shape), np.float32)
    largest_weight[foreground[0]] -= foreground[1]
    for label_value, box in boxes.items():
        # The foreground is the class if there is only one.
        resampled_box, weights = (
            foreground if len(boxes) == 1 else _weights(label[box] == label_value, box, matrices)
        )
        wins = weights > largest_weight[resampled_box] + _TIE
        resampled[resampled_box][wins] = label_value
        largest_weight[resampled_box][wins] = weights[wins]
    return resampled


def _class_boxes(label: np.ndarray, num_classes: int) -> dict[int, Box]:
    """The bounding box of each class that occurs, without the background."""
    boxes = ndimage.find_objects(label, num_classes - 1)
    return {label_value: box for label_value, box in enumerate(boxes, start=1) if box}


def _weights(
    mask: np.ndarray,
    box: Box,
    matrices: Sequence[np.ndarray | None],
) -> tuple[Box, np.ndarray]:
    """Interpolate a mask that is empty outside of a box.

    Args:
        mask: in the box.
    Returns:
        The box of the result, and weights.
    """
    resampled_box: list[slice] = []
    cut_matrices: list[np.ndarray | None] = []
    for matrix, columns in zip(matrices, box, strict=True):
        if matrix is None:
            resampled_box.append(columns)
            cut_matrices.append(None)
            continue
        # The output voxels that some voxel of the box contributes to.
        rows = np.flatnonzero(matrix[:, columns].any(1))
        reached = slice(0, 0)
        if len(rows):
            reached = slice(int(rows[0]), int(rows[-1]) + 1)
        resampled_box.append(reached)
        cut_matrices.append(matrix[reached, columns])
    return tuple(resampled_box), _multiply(mask.astype(np.float32), cut_matrices)


def _multiply(volume: np.ndarray, matrices: Sequence[np.ndarray | None]) -> np.ndarray:
    """Apply a matrix along each axis, None for unchanged axes; those that shrink the volume first."""
    steps = [
        (len(matrix) / matrix.shape[1], axis, matrix)
        for axis, matrix in enumerate(matrices)
        if matrix is not None
    ]
    for _, axis, matrix in sorted(steps, key=lambda step: step[:2]):
        if axis == volume.ndim - 1:
            volume = volume @ matrix.T
            continue
        before = volume.shape[:axis]
        voxels = volume.shape[axis]
        after = volume.shape[axis + 1 :]
        product = matrix @ volume.reshape(prod(before), voxels, prod(after))
        volume = product.reshape(*before, len(matrix), *after)
    return volume


def _matrices(
    shape: Sequence[int],
    new_shape: Sequence[int],
    order: int,
) -> list[np.ndarray | None]:
    """The matrix of each axis."""
    return [_matrix(voxels, new_voxels, order) for voxels, new_voxels in zip(shape, new_shape, strict=True)]


@lru_cache(64)
def _matrix(voxels: int, new_voxels: int, order: int) -> np.ndarray | None:
    """The float32 matrix of interpolation along one axis; None if nothing changes.

    Shape: (new_voxels, voxels).
    """
    if voxels == new_voxels:
        return None
    # Column i is the interpolation of a volume that is 1 at voxel i.
    units = np.eye(voxels)
    weights: np.ndarray = ndimage.zoom(
        units, (new_voxels / voxels, 1), order=order, mode="nearest", grid_mode=True
    )
    weights[np.abs(weights) < _NEGLIGIBLE] = 0
    weights = weights.astype(np.float32)
    weights.flags.writeable = False  # it is shared
    return weights
