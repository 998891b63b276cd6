"""All segmentation metrics of one case, per class, with a rule for missing classes.

A class in neither label map is undefined (None). A class in only one of them has Dice and surface Dice 0 and,
as distance, the diagonal of the image, so that a missed class cannot improve a mean.
Source: Reinke et al. 2024, doi:10.1038/s41592-023-02150-0 (missing values: the worst possible one);
Maier-Hein et al. 2024, doi:10.1038/s41592-023-02151-z.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from scipy.ndimage import find_objects

from medconv import doors
from medconv.metrics import centreline, surface_distance
from medconv.metrics import lesions as lesion_matching
from medconv.metrics.dice import ClassScores, LabelValues

MetricValues = dict[str, float | None]  # metric name to value
_ML_PER_MM3 = 1e-3
VOLUMES = ("volume_ml", "reference_volume_ml")  # no metrics, but columns of the CSV


@dataclass(frozen=True)
class ClassMasks:
    """One class of a case, in at least one of the two label maps.

    Args:
        prediction: mask, (*spatial) bool.
        reference: mask of the same shape.
        spacing_mm: of each axis of the masks.
        voxel_mm3: volume of a voxel.
        tolerance_mm: of the surface Dice.
        lesion_iou: overlap from which lesions match; only lesion-wise metrics need it.
    """

    prediction: np.ndarray
    reference: np.ndarray
    spacing_mm: tuple[float, ...]
    voxel_mm3: float
    tolerance_mm: float
    lesion_iou: float | None = None

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Voxels of the prediction and of the reference."""
        return int(self.prediction.sum()), int(self.reference.sum())

    @cached_property
    def distances(self) -> surface_distance.Distances:
        """In mm, between boundary voxels, in both directions."""
        return surface_distance.voxel_distances(self.prediction, self.reference, self.spacing_mm)

    @cached_property
    def lesions(self) -> lesion_matching.Lesions:
        """The connected components of both masks, matched."""
        assert self.lesion_iou is not None
        return lesion_matching.match(self.prediction, self.reference, self.lesion_iou)

    @cached_property
    def centrelines(self) -> tuple[np.ndarray, np.ndarray]:
        """Centrelines of the prediction and of the reference, as masks."""
        return centreline.skeleton(self.prediction), centreline.skeleton(self.reference)


@dataclass(frozen=True)
class Metric:
    """A metric of one class of a case. A feature adds one by the door `METRICS`.

    Where the class is in one label map only, a metric of which higher is better is 0, and one of which lower
    is better is the diagonal of the image; others are measured.
    Args:
        name: column and key of results.
        title: for people.
        better: 1 higher is better, -1 lower, a distance in mm, 0 closer to 0 (a signed error).
        measure: returns None where undefined.
        definition: for the report.
        unit: "" if it has none.
    """

    name: str
    title: str
    better: int
    measure: Callable[[ClassMasks], float | None]
    definition: str
    unit: str = ""

    @property
    def label(self) -> str:
        """Title and unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def error(self, value: float | None) -> float | None:
        """The value for comparisons: the absolute value of a signed error."""
        return abs(value) if value is not None and self.better == 0 else value


def _dice(masks: ClassMasks) -> float:
    overlap = int((masks.prediction & masks.reference).sum())
    return 2 * overlap / sum(masks.sizes)


def _surface_dice(masks: ClassMasks) -> float:
    # not cached: only this metric needs surface elements
    elements = surface_distance.element_distances(masks.prediction, masks.reference, masks.spacing_mm)
    return surface_distance.surface_dice(elements, masks.tolerance_mm)


def _volume_error(masks: ClassMasks) -> float | None:
    predicted, reference = masks.sizes
    return (predicted - reference) / reference if reference else None


def _volume_error_ml(masks: ClassMasks) -> float:
    predicted, reference = masks.sizes
    return (predicted - reference) * (masks.voxel_mm3 * _ML_PER_MM3)


def _cldice(masks: ClassMasks) -> float | None:
    return centreline.cldice(masks.prediction, masks.reference, *masks.centrelines)


CORE_METRICS = [  # those of features and packages come by the door `METRICS`
    Metric(
        name="dice",
        title="Dice",
        better=1,
        measure=_dice,
        definition="twice the volume of the overlap over the sum of both volumes.",
    ),
    Metric(
        name="nsd",
        title="Surface Dice",
        better=1,
        measure=_surface_dice,
        definition="the share of both surfaces' area within the tolerance of the other one "
        "(Nikolov et al. 2018).",
    ),
    Metric(
        name="hd95_mm",
        title="HD95",
        better=-1,
        measure=lambda masks: surface_distance.hd95(masks.distances),
        definition="the 95th percentile of the distances between the boundary voxels, the larger one of the "
        "two directions.",
        unit="mm",
    ),
    Metric(
        name="asd_mm",
        title="ASD",
        better=-1,
        measure=lambda masks: surface_distance.average_distance(masks.distances),
        definition="average symmetric surface distance: the mean over the boundary voxels of both.",
        unit="mm",
    ),
    # a share of the reference's volume; shown in per cent
    Metric(
        name="volume_error",
        title="Volume error",
        better=0,
        measure=_volume_error,
        definition="prediction minus reference; in per cent of the reference.",
        unit="%",
    ),
    Metric(
        name="volume_error_ml",
        title="Volume error",
        better=0,
        measure=_volume_error_ml,
        definition="prediction minus reference; in per cent of the reference.",
        unit="ml",
    ),
]
LESION_METRICS = [  # only where asked for
    Metric(
        name="lesion_f1",
        title="Lesion F1",
        better=1,
        measure=lambda masks: masks.lesions.f1,
        definition="matched lesions (connected components) over the mean number of predicted and reference "
        "lesions.",
    ),
    Metric(
        name="lesion_sensitivity",
        title="Lesion sensitivity",
        better=1,
        measure=lambda masks: len(masks.lesions.overlaps) / masks.lesions.reference,
        definition="the share of the reference's lesions that are matched.",
    ),
    Metric(
        name="lesion_precision",
        title="Lesion precision",
        better=1,
        measure=lambda masks: len(masks.lesions.overlaps) / masks.lesions.predicted,
        definition="the share of the predicted lesions that are matched.",
    ),
    Metric(
        name="panoptic_quality",
        title="Panoptic quality",
        better=1,
        measure=lambda masks: masks.lesions.panoptic_quality,
        definition="lesion F1 times the mean intersection over union of matched lesions "
        "(Kirillov et al. 2019).",
    ),
]
CENTRELINE_METRICS = [  # only where asked for
    Metric(
        name="cldice",
        title="clDice",
        better=1,
        measure=_cldice,
        definition="the harmonic mean of two shares: of the predicted centreline that lies in the reference, "
        "and of the reference's centreline that lies in the prediction (Shit et al. 2021).",
    )
]


@dataclass(frozen=True)
class MetricSelection:
    """What is measured beside `CORE_METRICS` and the metrics of features.

    Args:
        lesion_iou: intersection over union from which lesions match; None: no lesion-wise metrics.
        centreline: clDice, for structures that are thin.
    Raises:
        ValueError: a package that these metrics need is not installed.
    """

    lesion_iou: float | None = None
    centreline: bool = False

    def __post_init__(self) -> None:
        if self.centreline:
            centreline.check_installed()

    @property
    def metrics(self) -> list[Metric]:
        selected = [*CORE_METRICS, *doors.objects(doors.METRICS)]
        if self.lesion_iou is not None:
            selected += LESION_METRICS
        if self.centreline:
            selected += CENTRELINE_METRICS
        return selected


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
