"""Copies between arrays that store their axes in opposite orders, such as NIfTI files and NumPy's arrays."""

from itertools import product
from typing import Any

import numpy as np

_LINES = 4  # along the middle axis, which share the memory pages of the source
_DEPTH = 16  # along the last axis: planes of 512 x 512 voxels all fall into the same few lines of the cache


def fill(target: np.ndarray, source: np.ndarray) -> None:
    """`target[...] = source`, several times as fast for a volume that is stored the other way round.

    NumPy walks through such a source with the largest stride, which misses the cache at each voxel. Blocks
    have few enough lines to stay in it.

    Shape: both the same; C order for `target`.
    """
    if source.ndim != 3 or source.shape[2] == 1 or source.flags.c_contiguous:
        target[...] = source
        return
    _, lines, depth = source.shape
    for line, plane in product(range(0, lines, _LINES), range(0, depth, _DEPTH)):
        block = (slice(None), slice(line, line + _LINES), slice(plane, plane + _DEPTH))
        target[block] = source[block]


def in_c_order(array: np.ndarray, dtype: Any = None) -> np.ndarray:
    """The array itself if it has this type and C order, else a copy that has; `dtype` None: its own."""
    dtype = np.dtype(dtype or array.dtype)
    if array.flags.c_contiguous and array.dtype == dtype:
        return array
    copied = np.empty(array.shape, dtype)
    fill(copied, array)
    return copied
