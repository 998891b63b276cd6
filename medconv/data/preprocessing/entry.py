"""One case from its files to an entry of the store."""

from collections.abc import Sequence

import numpy as np
from scipy.ndimage import find_objects

from medconv.data.case import Case
from medconv.data.case_files import image_of, label_of, probabilities_on
from medconv.data.io.grids import on_grid
from medconv.data.preprocessing.preprocess import (
    PreprocessingConfig,
    preprocess,
    preprocess_label,
    preprocess_probabilities,
)
from medconv.data.preprocessing.store import NOTHING, Entry
from medconv.metrics.consensus import most_probable

_LOCATIONS = 5_000  # foreground voxels kept per class and case


def prepare_case(
    case: Case, config: PreprocessingConfig, num_classes: int, ignore: int | None = None
) -> Entry:
    """One case from its files to an entry of the store.

    Args:
        ignore: the label value of unlabelled voxels.
    Raises:
        ValueError: files that were replaced after the check and are now invalid.
    """
    native, grid = image_of(case)
    highest_label = -1
    if case.label is not None and case.soft_label is None:
        native_label, label_grid = label_of(case)
        native_label = on_grid(native_label, case.images[0], grid, case.label, label_grid)
        labelled = native_label if ignore is None else native_label[native_label != ignore]
        highest_label = labelled.max(initial=0)
    # Plane by plane, since the answers for a whole CT are 80 MB.
    is_finite = all(np.isfinite(plane).all() for channel in native for plane in channel)
    if not is_finite or highest_label >= num_classes:
        raise ValueError(
            f"case {case.id}: its files were replaced after the check, and are invalid; start again"
        )
    try:
        image, crop_info = preprocess(native, grid, config, case.missing_channels)
    except ValueError as error:
        raise ValueError(f"case {case.id}: {case.images[0]}: {error}") from error
    if case.label is None:
        return Entry(image, NOTHING, NOTHING, crop_info)
    if case.soft_label is not None:
        probabilities = probabilities_on(case, grid)
        soft_label = preprocess_probabilities(probabilities, crop_info, config)
        label = most_probable(soft_label.astype(np.float32))
        label = label.astype(np.uint8 if num_classes <= 256 else np.int16)
        return Entry(image, label, _foreground(label, num_classes, ignore), crop_info, soft_label)
    num_values = max(num_classes, 1 + (ignore or 0))
    label = preprocess_label(native_label, crop_info, config, num_values)
    return Entry(image, label, _foreground(label, num_classes, ignore), crop_info)


def _foreground(label: np.ndarray, num_classes: int, ignore: int | None) -> np.ndarray:
    """(voxels, 1 + axes) int32: class and position, spread evenly over each class.

    If there is a value to ignore, class 0 means all labelled voxels of any class.
    """
    rows = [np.empty((0, 1 + label.ndim), np.int32)]
    if ignore is not None:
        rows.append(_voxels(label != ignore, 0))
    # Each class in its bounding box: a hundred passes over a CT would take seconds.
    boxes = find_objects(label, max_label=num_classes - 1)
    for label_value, box in enumerate(boxes, start=1):
        if box is not None:
            corner = [axis.start for axis in box]
            rows.append(_voxels(label[box] == label_value, label_value, corner))
    return np.concatenate(rows)


def _voxels(mask: np.ndarray, label_value: int, corner: Sequence[int] = ()) -> np.ndarray:
    """Rows of a label value and the positions of a mask's voxels, at most `_LOCATIONS` of them.

    Args:
        corner: where the mask begins; default: at 0.
    """
    indices = np.flatnonzero(mask)
    count = min(len(indices), _LOCATIONS)
    evenly = np.linspace(0, len(indices) - 1, count).astype(np.int64)
    positions = np.column_stack(np.unravel_index(indices[evenly], mask.shape))
    positions += np.array(corner or [0] * mask.ndim)
    label_values = np.full(len(positions), label_value)
    return np.column_stack([label_values, positions]).astype(np.int32)
