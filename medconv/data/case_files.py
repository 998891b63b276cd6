"""Voxels of a case's files, with the spacing and the label values that its dataset declares."""

import numpy as np

from medconv.data.case import Case, Grid
from medconv.data.io.formats import shown
from medconv.data.io.grids import on_grid
from medconv.data.io.images import read_image, read_label


def image_of(case: Case) -> tuple[np.ndarray, Grid]:
    """All channels of a case and their grid; missing channels are 0.

    Shape: (channels, X, Y, Z) float32.

    Raises:
        ValueError: as `read_image`.
    """
    image, grid = read_image(case.images)
    for channel in case.missing_channels:  # in ascending order
        image = np.insert(image, channel, 0, axis=0)
    return image, grid.with_spacing_mm(case.source_spacing_mm)


def label_of(case: Case) -> tuple[np.ndarray, Grid]:
    """The label map of a case and its grid; of probabilities, the most probable class.

    Shape: (X, Y, Z) int16.

    Raises:
        ValueError: no label, as `read_label`, or a value that is not among those to relabel.
    """
    if case.label is None:
        raise ValueError("has no label, but training needs one")
    if case.soft_label is not None:
        return case.soft_label.label_map(case)
    label, grid = read_label(case.label, case.images[0], case.relabel)
    return label, grid.with_spacing_mm(case.source_spacing_mm)


def label_on(case: Case, grid: Grid) -> np.ndarray:
    """`label_of` a case in the order of axes of its image. Args: grid: of the image.

    Raises:
        ValueError: as `label_of`, or another grid.
    """
    label, label_grid = label_of(case)
    assert case.label is not None  # as `label_of` has checked
    return on_grid(label, case.images[0], grid, shown(case.label), label_grid)
