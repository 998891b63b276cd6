"""Voxels of a case's files, with the spacing and the label values that its dataset declares."""

from dataclasses import replace

import numpy as np

from medconv.data.case import Case, Grid
from medconv.data.io.grids import on_grid
from medconv.data.io.images import read_image, read_label
from medconv.data.io.probabilities import read_probabilities
from medconv.metrics.consensus import most_probable, shares


def image_of(case: Case) -> tuple[np.ndarray, Grid]:
    """All channels of a case and their grid; missing channels are 0.

    Shape: (channels, X, Y, Z) float32.

    Raises:
        ValueError: as `read_image`.
    """
    image, grid = read_image(case.images)
    for channel in case.missing_channels:  # in ascending order
        image = np.insert(image, channel, 0, axis=0)
    if case.source_spacing_mm is not None:
        grid = grid.with_spacing_mm(case.source_spacing_mm)
    return image, grid


def label_of(case: Case) -> tuple[np.ndarray, Grid]:
    """The label map of a case and its grid; of probabilities, the most probable class.

    Shape: (X, Y, Z) int16.

    Raises:
        ValueError: no label, as `read_label`, or a value that is not among those to relabel.
    """
    if case.label is None:
        raise ValueError("has no label, but training needs one")
    if case.soft_label is not None:
        probabilities, grid = probabilities_of(case)
        return most_probable(probabilities), grid
    label, grid = read_label(case.label, case.images[0], case.relabel)
    if case.source_spacing_mm is not None:
        grid = grid.with_spacing_mm(case.source_spacing_mm)
    return label, grid


def probabilities_of(case: Case) -> tuple[np.ndarray, Grid]:
    """The probability of each foreground class in a case with a `soft_label`: the mean over its raters.

    Shape: (classes, X, Y, Z) float32, on the grid of the first rater's file.

    Raises:
        ValueError: as `label_of` or `read_probabilities`; raters whose grids differ.
    """
    assert case.soft_label is not None and case.label is not None
    num_classes = case.soft_label.num_classes
    if case.soft_label.are_probabilities:
        probabilities, grid = read_probabilities(case.label, num_classes)
        if case.source_spacing_mm is not None:
            grid = grid.with_spacing_mm(case.source_spacing_mm)
        return probabilities, grid
    label_maps, grid = rater_labels_of(case)
    return shares([label_map for label_map in label_maps if label_map is not None], num_classes), grid


def probabilities_on(case: Case, grid: Grid) -> np.ndarray:
    """`probabilities_of` on the grid of the case's image. Shape: (classes, X, Y, Z) float32."""
    assert case.label is not None
    probabilities, label_grid = probabilities_of(case)
    # Each class has the grid of the label file
    on_image = [on_grid(of_class, case.images[0], grid, case.label, label_grid) for of_class in probabilities]
    return np.stack(on_image)


def rater_labels_of(case: Case) -> tuple[list[np.ndarray | None], Grid]:
    """The label map of each rater on the grid of the first one; None: this rater has none of this case.

    Shape: each (X, Y, Z) int16.

    Raises:
        ValueError: as `label_of`; raters whose grids or label values differ from those of the dataset.
    """
    assert case.soft_label is not None and case.label is not None
    first, grid = label_of(replace(case, soft_label=None))
    label_maps: list[np.ndarray | None] = [first]
    for path, relabel in zip(case.label_files[1:], case.label_relabels[1:], strict=True):
        if path is None:
            label_maps.append(None)
            continue
        further, rater_grid = label_of(replace(case, label=path, relabel=relabel, soft_label=None))
        label_maps.append(on_grid(further, case.label, grid, path, rater_grid))
    for path, label_map in zip(case.label_files, label_maps, strict=True):
        highest = case.soft_label.num_classes - 1
        if label_map is not None and label_map.max() > highest:
            raise ValueError(
                f"{path}: label value {label_map.max()} is not declared, expected 0 to {highest}"
            )
    return label_maps, grid


def rater_labels_on(case: Case, grid: Grid) -> list[np.ndarray | None]:
    """`rater_labels_of` on the grid of the case's image; empty where the files hold probabilities."""
    assert case.soft_label is not None and case.label is not None
    if case.soft_label.are_probabilities:
        return []
    label_maps, label_grid = rater_labels_of(case)
    on_image: list[np.ndarray | None] = []
    for label_map in label_maps:
        if label_map is not None:
            label_map = on_grid(label_map, case.images[0], grid, case.label, label_grid)
        on_image.append(label_map)
    return on_image
