"""The voxels of a case's files, read as its dataset says."""

import numpy as np

from medconv.data.case import Case, Grid
from medconv.data.io.images import read_image, read_label


def image_of(case: Case) -> tuple[np.ndarray, Grid]:
    """All channels, (channels, X, Y, Z) float32, and their grid. Raises: ValueError: as `read_image`."""
    image, grid = read_image(case.images)
    return image, _stated(grid, case)


def label_of(case: Case) -> tuple[np.ndarray, Grid]:
    """The label map, (X, Y, Z) int16, and its grid. Raises: ValueError: no label, or as `read_label`."""
    if case.label is None:
        raise ValueError("has no label, but training needs one")
    label, grid = read_label(case.label)
    return label, _stated(grid, case)


def _stated(grid: Grid, case: Case) -> Grid:
    return grid if case.source_spacing_mm is None else grid.with_spacing_mm(case.source_spacing_mm)
