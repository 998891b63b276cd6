"""Voxels of a case's files, with the spacing and the label values that its dataset declares."""

import numpy as np

from medconv.data.case import Case, Grid
from medconv.data.io.images import read_image, read_label


def image_of(case: Case) -> tuple[np.ndarray, Grid]:
    """All channels of a case and their grid.

    Shape: (channels, X, Y, Z) float32.

    Raises:
        ValueError: as `read_image`.
    """
    image, grid = read_image(case.images)
    return image, _with_declared_spacing(grid, case)


def label_of(case: Case) -> tuple[np.ndarray, Grid]:
    """The label map of a case and its grid.

    Shape: (X, Y, Z) int16.

    Raises:
        ValueError: no label, as `read_label`, or a value that is not among those to relabel.
    """
    if case.label is None:
        raise ValueError("has no label, but training needs one")
    label, grid = read_label(case.label, case.images[0], case.relabel)
    return label, _with_declared_spacing(grid, case)


def _with_declared_spacing(grid: Grid, case: Case) -> Grid:
    if case.source_spacing_mm is None:
        return grid
    return grid.with_spacing_mm(case.source_spacing_mm)
