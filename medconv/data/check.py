"""Check every file of a dataset, all faults at once, and take its fingerprint on the same pass."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from medconv.data.case import Case, Dataset, Grid
from medconv.data.files import check_same_grid, read_header, read_image, read_label
from medconv.data.preprocess import content_box, to_canonical

_SAMPLED = 5_000  # foreground voxels per case that stand for its intensities


@dataclass
class CaseReport:
    """What one case holds, in canonical (RAS) axis order, and what is wrong with it.

    Args: shape: of the content, voxels. class_voxels: one count per class. intensities: (channels, sampled voxels).
    """

    case: str
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    spacing_mm: tuple[float, ...] = ()
    flat: bool = False
    class_voxels: tuple[int, ...] = ()
    intensities: np.ndarray | None = None


@dataclass(frozen=True)
class Fingerprint:
    """What planning needs to know of a dataset; lengths in mm, shapes in voxels, axes right-anterior-superior.

    Args:
        shapes, spacings_mm: one per case, of its content.
        intensities: per channel, of the foreground of all cases: percentile_00_5, percentile_99_5, mean, std.
        class_voxels: per case, one count per class.
    """

    spatial_dims: int
    shapes: tuple[tuple[int, ...], ...]
    spacings_mm: tuple[tuple[float, ...], ...]
    intensities: tuple[dict[str, float], ...]
    class_voxels: tuple[tuple[int, ...], ...]


def check(dataset: Dataset, workers: int) -> tuple[Fingerprint, list[str]]:
    """Read every file once; returns the fingerprint and the warnings, one line each.

    Raises: ValueError: at least one fault; the message has one line for each, with case, file and expectation.
    """
    with ThreadPoolExecutor(workers) as pool:
        jobs = pool.map(lambda case: examine(case, dataset), dataset.cases)
        bar = tqdm(jobs, total=len(dataset.cases), desc="checking", unit="case", leave=False, disable=None)
        reports = list(bar)
    faults = [f"  case {r.case}: {fault}" for r in reports for fault in r.faults]
    flat, known = [r for r in reports if r.flat], [r for r in reports if r.shape]
    if flat and len(flat) < len(known):
        faults += [f"  case {r.case}: one slice only, while other cases are volumes" for r in flat]
    if faults:
        raise ValueError(f"dataset {dataset.name}: {len(faults)} faults in {len(reports)} cases\n" + "\n".join(faults))
    return _fingerprint(reports, 2 if flat else 3), [f"case {r.case}: {w}" for r in reports for w in r.warnings]


def examine(case: Case, dataset: Dataset) -> CaseReport:
    """Everything that can be said of one case from its files; never raises for a fault of theirs."""
    report = CaseReport(case.id)
    image = _image(case, len(dataset.modalities), report)
    label = _label(case, len(dataset.class_names), report)
    if image is not None and label is not None:
        try:
            check_same_grid(case.images[0], image[1], case.files[-1], label[1])
        except ValueError as error:
            report.faults.append(str(error))
            return report
        _describe(image[0], image[1], label[0], len(dataset.class_names), report)
    return report


def _image(case: Case, num_channels: int, report: CaseReport) -> tuple[np.ndarray, Grid] | None:
    try:
        image, grid = read_image(case.images)
    except ValueError as error:
        report.faults.append(str(error))
        return None
    path = case.images[0]
    if len(image) != num_channels:
        report.faults.append(f"{path}: expected as many channels as are declared, {num_channels}, found {len(image)}")
    if not np.isfinite(image).all():
        report.faults.append(
            f"{path}: {int((~np.isfinite(image)).sum())} voxels are NaN or infinite, expected finite numbers"
        )
    elif any(channel.min() == channel.max() for channel in image):
        report.warnings.append(f"{path}: a channel is constant")
    report.warnings += [w for p in case.images for w in _disagreeing_forms(p)]
    return image, grid


def _label(case: Case, num_classes: int, report: CaseReport) -> tuple[np.ndarray, Grid] | None:
    if case.label is None:
        report.faults.append("has no label, which training needs")
        return None
    try:
        label, grid = read_label(case.label)
    except ValueError as error:
        report.faults.append(str(error))
        return None
    undeclared = [int(v) for v in np.unique(label) if v >= num_classes]
    if undeclared:
        report.faults.append(f"{case.label}: label values {undeclared} are not declared, expected 0 to {num_classes - 1}")
    if not label.any():
        report.warnings.append(f"{case.label}: no foreground, every voxel is background")
    return label, grid


def _disagreeing_forms(path: object) -> list[str]:
    header = read_header(path).header  # type: ignore[arg-type]
    try:
        (sform, s_code), (qform, q_code) = header.get_sform(coded=True), header.get_qform(coded=True)
    except ValueError as error:  # a quaternion that is none
        return [f"{path}: its qform cannot be read ({error}); the sform is used"]
    if not (s_code and q_code):
        return []
    shape = header.get_data_shape()
    distance = Grid.of(shape, sform).corner_distance(Grid.of(shape, qform))
    return [f"{path}: sform and qform differ by {distance:.3g} voxels; the sform is used"] if distance > 0.01 else []


def _describe(image: np.ndarray, grid: Grid, label: np.ndarray, num_classes: int, report: CaseReport) -> None:
    report.flat = grid.shape[2] == 1
    canonical, spacing = to_canonical(image, grid)
    box = content_box(canonical)
    report.shape = tuple(s.stop - s.start for s in box)
    report.spacing_mm = spacing
    report.class_voxels = tuple(int(n) for n in np.bincount(label.clip(0, num_classes - 1).ravel(), minlength=num_classes))
    foreground = image[:, label > 0] if label.any() else image.reshape(len(image), -1)
    step = max(1, foreground.shape[1] // _SAMPLED)
    report.intensities = foreground[:, ::step].copy()  # a view would keep the whole foreground in memory


def _fingerprint(reports: Sequence[CaseReport], spatial_dims: int) -> Fingerprint:
    samples = np.concatenate([r.intensities for r in reports if r.intensities is not None], axis=1)
    low, high = np.percentile(samples, [0.5, 99.5], axis=1)
    intensities = [
        {"percentile_00_5": float(a), "percentile_99_5": float(b), "mean": float(c.mean()), "std": float(c.std())}
        for a, b, c in zip(low, high, samples, strict=True)
    ]
    return Fingerprint(
        spatial_dims,
        tuple(r.shape[:spatial_dims] for r in reports),
        tuple(r.spacing_mm[:spatial_dims] for r in reports),
        tuple(intensities),
        tuple(r.class_voxels for r in reports),
    )
