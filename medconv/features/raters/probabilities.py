"""Reading of labels that are the probability of each class, such as those that `predict` writes."""

from pathlib import Path

import numpy as np

from medconv.data.case import Grid
from medconv.data.io.images import read_image

_TOLERANCE = 1e-3  # of probabilities and of their sum; resampling and rounding leave a little more than 1


def read_probabilities(path: Path, num_classes: int) -> tuple[np.ndarray, Grid]:
    """The probability of each foreground class, and the grid.

    Shape: (classes, X, Y, Z) float32.

    Args:
        path: one channel for each foreground class, or a further one before them for the background.
        num_classes: with the background.

    Raises:
        ValueError: as `read_image`, another number of channels, values that are not from 0 to 1, or classes
            whose sum is above 1; names the voxel.
    """
    probabilities, grid = read_image([path])
    num_channels = len(probabilities)
    if num_channels not in (num_classes - 1, num_classes):
        raise ValueError(
            f"{path}: expected probabilities in {num_classes - 1} channels, one for each class, or "
            f"{num_classes} with the background, found {num_channels}"
        )
    _check_range(path, probabilities, "a probability")
    if num_channels == num_classes:
        probabilities = probabilities[1:]
    probabilities = probabilities.clip(0, 1)
    total = probabilities.sum(0)
    _check_range(path, total, "the sum of all classes")
    # A sum of 1.0002 would leave less than nothing for the background.
    return probabilities / np.maximum(total, 1), grid


def _check_range(path: Path, values: np.ndarray, what: str) -> None:
    # NaN is not within
    is_within = (values >= -_TOLERANCE) & (values <= 1 + _TOLERANCE)
    if is_within.all():
        return
    voxel = tuple(int(index) for index in np.argwhere(~is_within)[0])
    raise ValueError(
        f"{path}: {what} must lie between 0 and 1, found {float(values[voxel]):.6g} at voxel {voxel[-3:]}"
    )
