"""The voxels of a case's files, read as its dataset says."""

import numpy as np

from medconv.data.case import Case, Grid
from medconv.data.io.images import read_image, read_label


def image_of(case: Case) -> tuple[np.ndarray, Grid]:
    """All channels, (channels, X, Y, Z) float32, and their grid. Raises: ValueError: as `read_image`."""
    image, grid = read_image(case.images)
    return image, _stated(grid, case)


def label_of(case: Case) -> tuple[np.ndarray, Grid]:
    """The label map, (X, Y, Z) int16, and its grid.

    Raises: ValueError: no label, as `read_label`, or a value that is not among those to relabel.
    """
    if case.label is None:
        raise ValueError("has no label, but training needs one")
    label, grid = read_label(case.label, case.images[0])
    return label if case.relabel is None else _relabelled(label, case), _stated(grid, case)


def _relabelled(label: np.ndarray, case: Case) -> np.ndarray:
    values = dict(case.relabel or ())
    table = np.full(1 + max(*values, int(label.max())), -1, np.int16)
    table[list(values)] = list(values.values())
    new: np.ndarray = table[label]
    if undeclared := np.unique(label[new < 0]).tolist():
        expected = ", ".join(map(str, sorted(values)))
        raise ValueError(f"{case.label}: label values {undeclared} are not declared, expected {expected}")
    return new


def _stated(grid: Grid, case: Case) -> Grid:
    return grid if case.source_spacing_mm is None else grid.with_spacing_mm(case.source_spacing_mm)
