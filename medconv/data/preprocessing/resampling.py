"""Splines that take a volume to another number of voxels, one axis after the other.

Along an axis of n voxels, spline filter, extension at the edges and interpolation are together one matrix.
Three matrix products give what `scipy.ndimage.zoom` gives, to float32's rounding, in a tenth of its time; an
axis that keeps its length costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np
from scipy import ndimage

_NEGLIGIBLE = 1e-9  # a spline's far tail: as float32 it would end in numbers that processors multiply slowly
_TIE = 1e-6  # nearer than that, two classes share a voxel equally, and the lower one takes it
Box = tuple[slice, ...]


def zoom(volume: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Cubic splines; the outer edges of the first and last voxels stay where they are.

    Shape: (*spatial) -> `shape`, float32.
    """
    return _multiply(
        volume.astype(np.float32), [_matrix(n, new, 3) for n, new in zip(volume.shape, shape, strict=True)]
    )


def zoom_label(label: np.ndarray, shape: Sequence[int], num_classes: int) -> np.ndarray:
    """The class that weighs most after linear interpolation of each; no value appears that was not there
    before.

    Only the surroundings of a class are looked at: elsewhere it weighs nothing.
    Shape: (*spatial) integers -> `shape`, of the same type.
    """
    if tuple(shape) == label.shape:
        return label
    matrices = [_matrix(n, new, 1) for n, new in zip(label.shape, shape, strict=True)]
    out, most = np.zeros(tuple(shape), label.dtype), np.ones(tuple(shape), np.float32)
    boxes = {
        value: box for value, box in enumerate(ndimage.find_objects(label, num_classes - 1), start=1) if box
    }
    if not boxes:
        return out
    foreground = _weights(label > 0, _around(list(boxes.values())), matrices)
    most[foreground[0]] -= foreground[1]  # what is left is the background's
    for value, box in boxes.items():
        where, weights = foreground if len(boxes) == 1 else _weights(label == value, box, matrices)
        wins = weights > most[where] + _TIE
        out[where][wins] = value
        most[where][wins] = weights[wins]
    return out


def _weights(mask: np.ndarray, box: Box, matrices: Sequence[np.ndarray | None]) -> tuple[Box, np.ndarray]:
    """A mask that is empty outside `box`, interpolated: where it may weigh anything, and its weights
    there.
    """
    places, parts = [], []
    for matrix, columns in zip(matrices, box, strict=True):
        rows = (
            np.flatnonzero(matrix[:, columns].any(1))
            if matrix is not None
            else np.arange(columns.start, columns.stop)
        )
        places.append(slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 0))
        parts.append(None if matrix is None else matrix[places[-1], columns])
    return tuple(places), _multiply(mask[box].astype(np.float32), parts)


def _around(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds them all."""
    return tuple(
        slice(min(s.start for s in along), max(s.stop for s in along)) for along in zip(*boxes, strict=True)
    )


def _multiply(volume: np.ndarray, matrices: Sequence[np.ndarray | None]) -> np.ndarray:
    """A matrix along each axis, None for an axis that stays; those that make the volume smaller come
    first.
    """
    steps = [(len(m) / m.shape[1], axis, m) for axis, m in enumerate(matrices) if m is not None]
    for _, axis, matrix in sorted(steps, key=lambda step: step[:2]):
        before, after = volume.shape[:axis], volume.shape[axis + 1 :]
        if after:
            volume = (matrix @ volume.reshape(prod(before), volume.shape[axis], prod(after))).reshape(
                *before, len(matrix), *after
            )
        else:
            volume = volume @ matrix.T
    return volume


@lru_cache(64)
def _matrix(n: int, new: int, order: int) -> np.ndarray | None:
    """(new, n) float32: what interpolation along one axis does to each of its voxels; None where it
    changes nothing.
    """
    if n == new:
        return None
    units = ndimage.zoom(np.eye(n), (new / n, 1), order=order, mode="nearest", grid_mode=True)
    units[np.abs(units) < _NEGLIGIBLE] = 0
    units = units.astype(np.float32)
    units.flags.writeable = False
    return units
