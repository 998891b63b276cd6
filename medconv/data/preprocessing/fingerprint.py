"""Statistics of a dataset, of which the plan is made.

`examine` has measured each case; `cached_fingerprint` of `dataset_cache.py` asks for all and keeps it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from medconv.data.preprocessing.examine import CaseReport
from medconv.data.preprocessing.normalisation import LARGEST

INTENSITIES = ("percentile_00_5", "percentile_99_5", "mean", "std")  # measured in each channel


@dataclass(frozen=True)
class Fingerprint:
    """Statistics of a dataset for planning; lengths in mm, shapes in voxels, axes right-anterior-superior.

    Args:
        shapes, spacings_mm: one per case, of its content box.
        intensities: per channel, of the foreground of all cases (for pictures and image-level targets, of all
            voxels): percentile_00_5, percentile_99_5, mean, std.
        class_voxels: per case, one count per class; empty for image-level targets.
        thickness_mm: per foreground class, along each axis, the median of the cases that have the class; 0
            for a class that no case has. Empty for image-level targets.
        percentiles: per case and channel, see `value_bands`.
        contents: per case, a hash of the image's voxels; empty where it says nothing, see
            `examine.note_content`.
    """

    spatial_dims: int
    shapes: tuple[tuple[int, ...], ...]
    spacings_mm: tuple[tuple[float, ...], ...]
    intensities: tuple[dict[str, float], ...]
    class_voxels: tuple[tuple[int, ...], ...]
    contents: tuple[str, ...] = ()
    thickness_mm: tuple[tuple[float, ...], ...] = ()
    percentiles: tuple[tuple[tuple[float, ...], ...], ...] = ()

    def at_spacing(self, spacing_mm: Sequence[float] | None) -> "Fingerprint":
        """The fingerprint at another spacing, of voxels whose headers say 1 x 1 x 1 mm; None: unchanged."""
        if spacing_mm is None:
            return self
        scaled = [
            tuple(mm * scale for mm, scale in zip(row, spacing_mm, strict=True)) for row in self.thickness_mm
        ]
        return replace(self, spacings_mm=(tuple(spacing_mm),) * len(self.shapes), thickness_mm=tuple(scaled))


def measure(reports: Sequence[CaseReport]) -> Fingerprint:
    """The fingerprint of valid cases."""
    spatial_dims = 2 if reports[0].flat else 3
    sampled = [r.intensities for r in reports if r.intensities is not None]
    if not sampled:
        raise ValueError("every valid case is in the test split, expected at least one to train on")
    samples = np.concatenate(sampled, axis=1)  # (channels, voxels)
    if not samples.shape[1]:
        what = "every voxel of all label maps has the value to ignore"
        raise ValueError(f"no case has a labelled voxel: {what}")
    is_known = ~np.isnan(samples)
    samples = np.where(is_known, samples, 0)
    if max(samples.max(), -samples.min()) >= LARGEST:
        samples = samples.astype(np.float64)
    intensities = []
    for channel, known in zip(samples, is_known, strict=True):
        values = channel[known]
        low, high = np.percentile(values, [0.5, 99.5])
        statistics = (low, high, values.mean(), values.std())  # in the order of INTENSITIES
        intensities.append(dict(zip(INTENSITIES, map(float, statistics), strict=True)))
    thickness_mm = []  # per foreground class, the median of the cases that have it
    measured = [report.thickness_mm for report in reports if report.thickness_mm is not None]
    for of_cases in np.stack(measured, axis=1)[1:] if measured else ():  # (cases, axes)
        present = of_cases[of_cases[:, 0] > 0]
        row = np.median(present, axis=0) if len(present) else np.zeros(of_cases.shape[1])
        thickness_mm.append(tuple(round(float(mm), 4) for mm in row[:spatial_dims]))
    return Fingerprint(
        spatial_dims=spatial_dims,
        shapes=tuple(r.shape[:spatial_dims] for r in reports),
        spacings_mm=tuple(r.spacing_mm[:spatial_dims] for r in reports),
        intensities=tuple(intensities),
        class_voxels=tuple(r.class_voxels for r in reports),
        contents=tuple(r.content for r in reports) if any(r.content for r in reports) else (),
        thickness_mm=tuple(thickness_mm),
        percentiles=tuple(r.percentiles for r in reports),
    )
