"""All segmentation metrics of one case, per class, with a rule for missing classes.

A class in neither label map is undefined (None). A class in only one of them has Dice and surface Dice 0 and,
as distance, the diagonal of the image, so that a missed class cannot improve a mean.
Source: Reinke et al. 2024, doi:10.1038/s41592-023-02150-0 (missing values: the worst possible one);
Maier-Hein et al. 2024, doi:10.1038/s41592-023-02151-z.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from scipy.ndimage import find_objects

from medconv.metrics import lesions as metrics_lesions
from medconv.metrics import surface_distance
from medconv.metrics.dice import ClassScores, LabelValues

MetricValues = dict[str, float | None]  # metric name to value
_ML = 1e-3  # ml per mm^3


@dataclass(frozen=True)
class ClassMasks:
    """One class of a case, in at least one of the two label maps.

    Args: prediction, reference: masks of one shape, (*spatial) bool. tolerance_mm: of the surface Dice.
        lesion_iou: overlap from which lesions match; None: they are not measured.
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
    def lesions(self) -> metrics_lesions.Lesions:
        """The connected components of both masks, matched."""
        assert self.lesion_iou is not None
        return metrics_lesions.match(self.prediction, self.reference, self.lesion_iou)


@dataclass(frozen=True)
class Metric:
    """A metric of one class of a case. A module of `medconv.metrics` that appends one to `METRICS` adds it.

    Where the class is in one label map only, a metric of which higher is better is 0, and one of which lower
    is better is the diagonal of the image; others are measured.
    Args:
        better: 1 higher is better, -1 lower, a distance in mm, 0 closer to 0 (a signed error).
        measure: None: undefined. definition: for the report.
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
    return 2 * int((masks.prediction & masks.reference).sum()) / sum(masks.sizes)


def _surface_dice(masks: ClassMasks) -> float:
    elements = surface_distance.element_distances(masks.prediction, masks.reference, masks.spacing_mm)
    return surface_distance.surface_dice(elements, masks.tolerance_mm)


def _volume_error(masks: ClassMasks) -> float | None:
    predicted, reference = masks.sizes
    return (predicted - reference) / reference if reference else None


def _volume_error_ml(masks: ClassMasks) -> float:
    predicted, reference = masks.sizes
    return (predicted - reference) * (masks.voxel_mm3 * _ML)


METRICS = [
    Metric("dice", "Dice", 1, _dice, "twice the volume of the overlap over the sum of both volumes."),
    Metric(
        *("nsd", "Surface Dice", 1, _surface_dice),
        "the share of both surfaces' area within the tolerance of the other one (Nikolov et al. 2018).",
    ),
    Metric(
        *("hd95_mm", "HD95", -1, lambda masks: surface_distance.hd95(masks.distances)),
        "the 95th percentile of the distances between the boundary voxels, the larger one of the two "
        "directions.",
        "mm",
    ),
    Metric(
        *("asd_mm", "ASD", -1, lambda masks: surface_distance.average_distance(masks.distances)),
        "average symmetric surface distance: the mean over the boundary voxels of both.",
        "mm",
    ),
    # a share of the reference's volume; shown in per cent
    Metric(
        *("volume_error", "Volume error", 0, _volume_error),
        *("prediction minus reference; in per cent of the reference.", "%"),
    ),
    Metric(
        *("volume_error_ml", "Volume error", 0, _volume_error_ml),
        *("prediction minus reference; in per cent of the reference.", "ml"),
    ),
]
LESION_METRICS = [  # only where they are asked for
    Metric(
        *("lesion_f1", "Lesion F1", 1, lambda masks: masks.lesions.f1),
        "matched lesions (connected components) over the mean number of predicted and reference lesions.",
    ),
    Metric(
        *("lesion_sensitivity", "Lesion sensitivity", 1),
        lambda masks: len(masks.lesions.overlaps) / masks.lesions.reference,
        "the share of the reference's lesions that are matched.",
    ),
    Metric(
        *("lesion_precision", "Lesion precision", 1),
        lambda masks: len(masks.lesions.overlaps) / masks.lesions.predicted,
        "the share of the predicted lesions that are matched.",
    ),
    Metric(
        *("panoptic_quality", "Panoptic quality", 1, lambda masks: masks.lesions.panoptic_quality),
        "lesion F1 times the mean intersection over union of matched lesions (Kirillov et al. 2019).",
    ),
]
VOLUMES = ("volume_ml", "reference_volume_ml")  # no metrics, but columns of the CSV


def metrics_of(lesion_iou: float | None) -> list[Metric]:
    """What is measured. Args: lesion_iou: None: no lesions."""
    return METRICS if lesion_iou is None else [*METRICS, *LESION_METRICS]


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
    lesion_iou: float | None = None,
) -> dict[str, ClassScores]:
    """Metric to class to value. Voxels whose reference is `targets.ignore` count as background in both.

    Shape: two integer label maps (X, Y, Z); a single slice along any axis is measured in 2D.
    Args: grid: of both label maps. tolerance_mm: of the surface Dice, per class.
        lesion_iou: overlap from which lesions match; None: they are not measured.
    """
    if targets.ignore is not None:
        labelled = reference != targets.ignore
        prediction, reference = np.where(labelled, prediction, 0), np.where(labelled, reference, 0)
    spacing_mm: tuple[float, ...] = grid.spacing_mm
    if 1 in reference.shape:
        thin = 2 - reference.shape[::-1].index(1)  # the last such axis
        prediction, reference = prediction.squeeze(thin), reference.squeeze(thin)
        spacing_mm = (*spacing_mm[:thin], *spacing_mm[thin + 1 :])
    boxes = [find_objects(label, max_label=targets.num_values - 1) for label in (prediction, reference)]
    worst_mm = surface_distance.diagonal_mm(prediction.shape, spacing_mm)
    metrics = metrics_of(lesion_iou)
    rows: dict[str, ClassScores] = {name: {} for name in (*(m.name for m in metrics), *VOLUMES)}
    for name, values in targets.by_name.items():
        box = _around([boxes_of_map[value - 1] for boxes_of_map in boxes for value in values])
        mask, true = (np.isin(m[box], values) if box else np.zeros(0, bool) for m in (prediction, reference))
        masks = ClassMasks(mask, true, spacing_mm, grid.voxel_mm3, tolerance_mm[name], lesion_iou)
        for metric in metrics:
            rows[metric.name][name] = _value(metric, masks, worst_mm)
        for volume, voxels in zip(VOLUMES, masks.sizes, strict=True):
            rows[volume][name] = voxels * (grid.voxel_mm3 * _ML)
    return rows


def _value(metric: Metric, masks: ClassMasks, worst_mm: float) -> float | None:
    if not any(masks.sizes):
        return None
    if metric.better and not all(masks.sizes):
        return 0.0 if metric.better > 0 else worst_mm
    return metric.measure(masks)


def _around(boxes: Sequence[tuple[slice, ...] | None]) -> tuple[slice, ...] | None:
    """The smallest box around all boxes; voxels outside of both masks do not change surfaces."""
    present = [box for box in boxes if box is not None]
    if not present:
        return None
    axes = zip(*present, strict=True)
    return tuple(slice(min(s.start for s in axis), max(s.stop for s in axis)) for axis in axes)
