"""All segmentation metrics of one case, per class, with a rule for missing classes.

A class in neither label map is undefined (None). A class in only one of them has Dice and surface Dice 0 and,
as distance, the diagonal of the image, so that a missed class cannot improve a mean.
Source: Reinke et al. 2024, doi:10.1038/s41592-023-02150-0 (missing values: the worst possible one);
Maier-Hein et al. 2024, doi:10.1038/s41592-023-02151-z.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from scipy.ndimage import find_objects

from medconv.metrics import surface_distance
from medconv.metrics.class_masks import ClassMasks
from medconv.metrics.dice import ClassScores, LabelValues
from medconv.metrics.segmentation_metrics import Metric, MetricSelection

MetricValues = dict[str, float | None]  # metric name to value
_ML_PER_MM3 = 1e-3
VOLUMES = ("volume_ml", "reference_volume_ml")  # no metrics, but columns of the CSV


class VoxelGrid(Protocol):
    """The grid of a label map; `data/` implements it."""

    @property
    def spacing_mm(self) -> tuple[float, ...]: ...

    @property
    def voxel_mm3(self) -> float: ...


def measure(
    prediction: np.ndarray,
    reference: np.ndarray,
    grid: VoxelGrid,
    targets: LabelValues,
    tolerance_mm: Mapping[str, float],
    selection: MetricSelection | None = None,
) -> dict[str, ClassScores]:
    """Metric to class to value. Voxels whose reference is `targets.ignore` count as background in both.

    Shape: two integer label maps (X, Y, Z); a single slice along any axis is measured in 2D.

    Args:
        grid: of both label maps.
        tolerance_mm: of the surface Dice, per class.
        selection: further metrics; None: none.
    """
    if targets.ignore is not None:
        prediction, reference = _without_ignored(prediction, reference, targets.ignore)
    spacing_mm: tuple[float, ...] = grid.spacing_mm
    if 1 in reference.shape:
        prediction, reference, spacing_mm = _as_slice(prediction, reference, spacing_mm)
    selection = selection or MetricSelection()
    metrics = selection.metrics
    columns = [*(metric.name for metric in metrics), *VOLUMES]
    scores: dict[str, ClassScores] = {column: {} for column in columns}
    worst_mm = surface_distance.diagonal_mm(prediction.shape, spacing_mm)
    # one class at a time, so that memory does not grow with the number of classes
    for name, class_prediction, class_reference in _class_masks(prediction, reference, targets):
        masks = ClassMasks(
            prediction=class_prediction,
            reference=class_reference,
            spacing_mm=spacing_mm,
            voxel_mm3=grid.voxel_mm3,
            tolerance_mm=tolerance_mm[name],
            lesion_iou=selection.lesion_iou,
        )
        for column, value in _class_scores(masks, metrics, worst_mm).items():
            scores[column][name] = value
    return scores


def _without_ignored(
    prediction: np.ndarray, reference: np.ndarray, ignore: int
) -> tuple[np.ndarray, np.ndarray]:
    """Both label maps, with background where the reference has the value to ignore."""
    is_labelled = reference != ignore
    return np.where(is_labelled, prediction, 0), np.where(is_labelled, reference, 0)


def _as_slice(
    prediction: np.ndarray, reference: np.ndarray, spacing_mm: tuple[float, ...]
) -> tuple[np.ndarray, np.ndarray, tuple[float, ...]]:
    """Both label maps and the spacing without the last axis of one voxel."""
    axis = 2 - reference.shape[::-1].index(1)
    plane_spacing_mm = (*spacing_mm[:axis], *spacing_mm[axis + 1 :])
    return prediction.squeeze(axis), reference.squeeze(axis), plane_spacing_mm


def _class_masks(
    prediction: np.ndarray, reference: np.ndarray, targets: LabelValues
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, predicted mask and reference mask of each class, cropped to the voxels of both."""
    highest = targets.num_values - 1
    predicted_boxes = find_objects(prediction, max_label=highest)
    reference_boxes = find_objects(reference, max_label=highest)
    for name, values in targets.by_name.items():
        # `find_objects` gives the box of label value 1 first; None: the map does not have the value
        boxes = [predicted_boxes[value - 1] for value in values]
        boxes += [reference_boxes[value - 1] for value in values]
        box = _bounding_box(boxes)
        if box is None:
            yield name, np.zeros(0, bool), np.zeros(0, bool)
        else:
            yield name, np.isin(prediction[box], values), np.isin(reference[box], values)


def _class_scores(masks: ClassMasks, metrics: Sequence[Metric], worst_mm: float) -> MetricValues:
    """Metric, and volume, to value."""
    scores = {metric.name: _value(metric, masks, worst_mm) for metric in metrics}
    for column, voxels in zip(VOLUMES, masks.sizes, strict=True):
        scores[column] = voxels * (masks.voxel_mm3 * _ML_PER_MM3)
    return scores


def _value(metric: Metric, masks: ClassMasks, worst_mm: float) -> float | None:
    if not any(masks.sizes):
        return None
    # in one of the two maps only: the worst possible value
    is_missed = not all(masks.sizes)
    if metric.better and is_missed:
        return 0.0 if metric.better > 0 else worst_mm
    return metric.measure(masks)


def _bounding_box(boxes: Sequence[tuple[slice, ...] | None]) -> tuple[slice, ...] | None:
    """The smallest box around all boxes; voxels outside of both masks do not change surfaces."""
    present = [box for box in boxes if box is not None]
    if not present:
        return None
    sides = zip(*present, strict=True)  # per axis
    return tuple(slice(min(s.start for s in side), max(s.stop for s in side)) for side in sides)
