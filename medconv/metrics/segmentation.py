"""All metrics of one case: what is measured of each class, and what holds where a class is missing.

A class that neither label map holds has no value (None). One that only one of them holds has Dice and surface
Dice 0 and, as distance, the length of the image from corner to corner, so that a class which was missed
cannot improve a mean.
Source: Reinke et al. 2024, doi:10.1038/s41592-023-02150-0 (missing values: the worst possible one);
Maier-Hein et al. 2024, doi:10.1038/s41592-023-02151-z.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import find_objects

from medconv.metrics import surface_distance
from medconv.metrics.dice import Row
from medconv.metrics.protocols import LabelValues, VoxelGrid

MetricValues = dict[str, float | None]  # metric name to value
_ML = 1e-3  # of a mm^3


@dataclass(frozen=True)
class Metric:
    """What one column means. Args: better: 1 the higher, -1 the lower; 0 the closer to 0 (a signed error)."""

    name: str
    title: str
    better: int
    unit: str = ""

    @property
    def label(self) -> str:
        """Title and unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def error(self, value: float | None) -> float | None:
        """What two sets of predictions are compared by: a signed error without its sign."""
        return abs(value) if value is not None and self.better == 0 else value


METRICS = (
    Metric("dice", "Dice", 1),
    Metric("nsd", "Surface Dice", 1),
    Metric("hd95_mm", "HD95", -1, "mm"),
    Metric("asd_mm", "ASD", -1, "mm"),
    Metric("volume_error", "Volume error", 0, "%"),  # a share of the reference's volume; shown in per cent
    Metric("volume_error_ml", "Volume error", 0, "ml"),
)
VOLUMES = ("volume_ml", "reference_volume_ml")  # are no error, but belong into the CSV


def measure(
    prediction: np.ndarray,
    reference: np.ndarray,
    grid: VoxelGrid,
    targets: LabelValues,
    tolerance_mm: Mapping[str, float],
) -> dict[str, Row]:
    """Metric to class to value. Voxels where the reference is `targets.ignore` belong to no class in either
    label map.

    Shape: two label maps (X, Y, Z) of whole numbers; one slice, whichever way it lies, is measured as the
    plane that it is.
    Args: grid: of both. tolerance_mm: of the surface Dice, for each class.
    """
    if targets.ignore is not None:
        labelled = reference != targets.ignore
        prediction, reference = np.where(labelled, prediction, 0), np.where(labelled, reference, 0)
    voxel_ml = grid.voxel_mm3 * _ML
    spacing_mm: tuple[float, ...] = grid.spacing_mm
    if 1 in grid.shape:
        thin = 2 - grid.shape[::-1].index(1)  # the last such axis
        prediction, reference = prediction.squeeze(thin), reference.squeeze(thin)
        spacing_mm = (*spacing_mm[:thin], *spacing_mm[thin + 1 :])
    boxes = [find_objects(label, max_label=targets.num_values - 1) for label in (prediction, reference)]
    worst_mm = surface_distance.diagonal_mm(prediction.shape, spacing_mm)
    rows: dict[str, Row] = {name: {} for name in (*(m.name for m in METRICS), *VOLUMES)}
    for name, values in targets.by_name.items():
        box = _around([boxes_of_map[value - 1] for boxes_of_map in boxes for value in values])
        mask, reference_mask = (
            _mask(label[box], values) if box else np.zeros(0, bool) for label in (prediction, reference)
        )
        measured = _one_class(mask, reference_mask, spacing_mm, tolerance_mm[name], voxel_ml, worst_mm)
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
    """The smallest box around some; surfaces do not depend on what lies outside of both masks."""
    present = [box for box in boxes if box is not None]
    if not present:
        return None
    return tuple(
        slice(min(s.start for s in axis), max(s.stop for s in axis)) for axis in zip(*present, strict=True)
    )


def _mask(label: np.ndarray, values: Sequence[int]) -> np.ndarray:
    return label == values[0] if len(values) == 1 else np.isin(label, values)
