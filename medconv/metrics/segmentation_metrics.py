"""The metrics of label maps: each with its name, its definition and the function that measures it."""

from collections.abc import Callable
from dataclasses import dataclass

from medconv.metrics import centreline, surface_distance
from medconv.metrics.class_masks import ClassMasks

_ML_PER_MM3 = 1e-3


@dataclass(frozen=True)
class Metric:
    """A metric of one class of a case. A module of `medconv.metrics` that appends one to `METRICS` adds it.

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


METRICS = [
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
    """What is measured beside `METRICS`.

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
        selected = list(METRICS)
        if self.lesion_iou is not None:
            selected += LESION_METRICS
        if self.centreline:
            selected += CENTRELINE_METRICS
        return selected
