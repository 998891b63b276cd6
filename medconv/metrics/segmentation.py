"""All segmentation metrics of one case, per class, with a rule for missing classes.

A class in neither label map is undefined (None). A class in only one of them has Dice and surface Dice 0 and,
as distance, the diagonal of the image, so that a missed class cannot improve a mean.
Source: Reinke et al. 2024, doi:10.1038/s41592-023-02150-0 (missing values: the worst possible one);
Maier-Hein et al. 2024, doi:10.1038/s41592-023-02151-z.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.ndimage import find_objects

from medconv.metrics import surface_distance
from medconv.metrics.dice import ClassScores, LabelValues

MetricValues = dict[str, float | None]  # metric name to value
_ML = 1e-3  # ml per mm^3


@dataclass(frozen=True)
class Metric:
    """A metric. Args: better: 1 higher is better, -1 lower, 0 closer to 0 (a signed error)."""

    name: str
    title: str
    better: int
    unit: str = ""

    @property
    def label(self) -> str:
        """Title and unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def error(self, value: float | None) -> float | None:
        """The value for comparisons: the absolute value of a signed error."""
        return abs(value) if value is not None and self.better == 0 else value


METRICS = (
    Metric("dice", "Dice", 1),
    Metric("nsd", "Surface Dice", 1),
    Metric("hd95_mm", "HD95", -1, "mm"),
    Metric("asd_mm", "ASD", -1, "mm"),
    Metric("volume_error", "Volume error", 0, "%"),  # a share of the reference's volume; shown in per cent
    Metric("volume_error_ml", "Volume error", 0, "ml"),
)
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
) -> dict[str, ClassScores]:
    """Metric to class to value. Voxels whose reference is `targets.ignore` count as background in both.

    Shape: two integer label maps (X, Y, Z); a single slice along any axis is measured in 2D.
    Args: grid: of both label maps. tolerance_mm: of the surface Dice, per class.
    """
    if targets.ignore is not None:
        labelled = reference != targets.ignore
        prediction, reference = np.where(labelled, prediction, 0), np.where(labelled, reference, 0)
    voxel_ml = grid.voxel_mm3 * _ML
    spacing_mm: tuple[float, ...] = grid.spacing_mm
    if 1 in reference.shape:
        thin = 2 - reference.shape[::-1].index(1)  # the last such axis
        prediction, reference = prediction.squeeze(thin), reference.squeeze(thin)
        spacing_mm = (*spacing_mm[:thin], *spacing_mm[thin + 1 :])
    boxes = [find_objects(label, max_label=targets.num_values - 1) for label in (prediction, reference)]
    worst_mm = surface_distance.diagonal_mm(prediction.shape, spacing_mm)
    rows: dict[str, ClassScores] = {name: {} for name in (*(m.name for m in METRICS), *VOLUMES)}
    for name, values in targets.by_name.items():
        box = _around([boxes_of_map[value - 1] for boxes_of_map in boxes for value in values])
        mask, true = (np.isin(m[box], values) if box else np.zeros(0, bool) for m in (prediction, reference))
        measured = _one_class(mask, true, spacing_mm, tolerance_mm[name], voxel_ml, worst_mm)
        for metric, value in measured.items():
            rows[metric][name] = value
    return rows


def _one_class(
    prediction: np.ndarray,
    reference: np.ndarray,
    spacing_mm: Sequence[float],
    tolerance_mm: float,
    voxel_ml: float,
    worst_mm: float,
) -> MetricValues:
    voxels, reference_voxels = int(prediction.sum()), int(reference.sum())
    row: MetricValues = {"volume_ml": voxels * voxel_ml, "reference_volume_ml": reference_voxels * voxel_ml}
    if not voxels and not reference_voxels:
        return {**row, **dict.fromkeys(m.name for m in METRICS)}
    row["dice"] = 2 * int((prediction & reference).sum()) / (voxels + reference_voxels)
    row["volume_error"] = (voxels - reference_voxels) / reference_voxels if reference_voxels else None
    row["volume_error_ml"] = (voxels - reference_voxels) * voxel_ml
    if not voxels or not reference_voxels:
        return {**row, "nsd": 0.0, "hd95_mm": worst_mm, "asd_mm": worst_mm}
    distances = surface_distance.voxel_distances(prediction, reference, spacing_mm)
    elements = surface_distance.element_distances(prediction, reference, spacing_mm)
    row["nsd"] = surface_distance.surface_dice(elements, tolerance_mm)
    row["hd95_mm"] = surface_distance.hd95(distances)
    row["asd_mm"] = surface_distance.average_distance(distances)
    return row


def _around(boxes: Sequence[tuple[slice, ...] | None]) -> tuple[slice, ...] | None:
    """The smallest box around all boxes; voxels outside of both masks do not change surfaces."""
    present = [box for box in boxes if box is not None]
    if not present:
        return None
    axes = zip(*present, strict=True)
    return tuple(slice(min(s.start for s in axis), max(s.stop for s in axis)) for axis in axes)
