"""Where a patch lies: its corner, the first voxel along each axis, at random or around a chosen voxel.

A corner is negative where the image is smaller than the patch, which is then padded on both sides.
"""

from collections.abc import Sequence

import numpy as np

from medconv.data.preprocessing.store import Entry


def random_corner(rng: np.random.Generator, image_shape: Sequence[int], box: Sequence[int]) -> np.ndarray:
    """A corner of which every one inside the image is equally likely. Shape: (axes,)."""
    margin = np.subtract(image_shape, box)
    corner = rng.integers(0, np.maximum(margin, 0) + 1)
    return np.where(margin > 0, corner, margin // 2)


def corner_around(
    voxel: Sequence[int] | np.ndarray, image_shape: Sequence[int], box: Sequence[int]
) -> np.ndarray:
    """The corner of the patch with this voxel at its centre, moved as far as needed to lie inside the image.

    Args:
        voxel: index along each axis.
        image_shape: voxels.
        box: of the patch, voxels; the centre of an even number is the voxel behind its middle.
    """
    margin = np.subtract(image_shape, box)
    corner = np.subtract(voxel, np.floor_divide(box, 2))
    inside = np.clip(corner, 0, np.maximum(margin, 0))
    return np.where(margin > 0, inside, margin // 2)  # half of the padding on each side


def foreground_corner(
    rng: np.random.Generator,
    entry: Entry,
    box: Sequence[int],
    foreground_share: float,
    label_values: Sequence[int] | None = None,
) -> np.ndarray:
    """The corner of a patch that is centred on foreground in this share of calls, and lies anywhere else.

    Where a dataset has a value to ignore, `anywhere` is centred on a labelled voxel.
    Args:
        entry: the prepared case; its foreground is read, its image is not.
        foreground_share: 0 to 1.
        label_values: the classes to centre on, each equally often; None: all classes of the case.
    """
    image_shape = entry.label.shape
    # Drawn even if it is not used: the numbers after it, and with them all seeded runs, stay the same.
    corner = random_corner(rng, image_shape, box)
    labelled, foreground = split_foreground(entry.foreground)
    if label_values is not None:
        foreground = foreground[np.isin(foreground[:, 0], label_values)]
    on_foreground = len(foreground) > 0 and rng.random() < foreground_share
    candidates = foreground if on_foreground else labelled
    if len(candidates) == 0:
        return corner
    return corner_around(foreground_voxel(candidates, rng), image_shape, box)


def split_foreground(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of class 0, which are labelled voxels of any class (see `Entry`), and rows of the foreground."""
    has_labelled = len(rows) > 0 and rows[0, 0] == 0
    first_foreground = np.searchsorted(rows[:, 0], 1) if has_labelled else 0
    return rows[:first_foreground], rows[first_foreground:]


def foreground_voxel(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The position of a random voxel of a random class. Shape: (voxels, 1 + axes) -> (axes,).

    Args:
        rows: class and position, sorted by class. A binary search reads only a few of them.
    """
    first_class = int(rows[0, 0])
    last_class = int(rows[-1, 0])
    # Class c is in rows bounds[c - first_class] ... bounds[c - first_class + 1] - 1.
    bounds = np.searchsorted(rows[:, 0], np.arange(first_class, last_class + 2))
    present = np.flatnonzero(np.diff(bounds))
    chosen = present[rng.integers(len(present))]
    row = rng.integers(bounds[chosen], bounds[chosen + 1])
    return np.asarray(rows[row, 1:])
