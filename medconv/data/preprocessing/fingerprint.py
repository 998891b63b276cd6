"""Check every file of a dataset, report all errors at once, and measure its fingerprint in the same pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from medconv.data.case import Case, Dataset, Grid
from medconv.data.case_files import image_of, label_of
from medconv.data.io import rtstruct
from medconv.data.io.grids import on_grid
from medconv.data.io.images import UNORIENTED, lacks_orientation
from medconv.data.io.raster import are_picture_channels
from medconv.data.preprocessing.doubts import (
    far_spacing,
    header_doubts,
    is_no_data,
    lost_spacing,
    named,
    repeated_slices,
    same_images,
    wrapped_negatives,
)
from medconv.data.preprocessing.normalisation import range_error, wide
from medconv.data.preprocessing.orientation import to_canonical
from medconv.data.preprocessing.preprocess import content_box
from medconv.metrics.label_counts import value_counts
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.memory_order import in_c_order
from medconv.utils.threads import each

INTENSITIES = ("percentile_00_5", "percentile_99_5", "mean", "std")  # measured in each channel
_MAX_SHEAR = 0.5  # degrees; more is not rounding but a tilted gantry
VERSION = 7  # raise it when a check measures more or otherwise
_MAX_SAMPLES = 5_000  # voxels per case whose intensities are sampled
_MIN_SAMPLES = 100
_ALL_SAMPLES = 20_000_000  # over all cases, if that leaves each the lowest number
_WRONG_DIMS = {
    True: "one slice only, while most cases are volumes",
    False: "a volume, while most cases are one slice only",
}


@dataclass
class CaseReport:
    """The content of one case, its errors and warnings.

    Args:
        grid, channels, low, high: of its files; lowest and highest intensity of all channels.
        no_data: lowest values of channels that probably stand for no data.
        shape, spacing_mm: of the content, in canonical (RAS) axis order.
        oriented: every file says where left and right are.
        class_voxels: one count per class, without voxels to ignore.
        ignored_voxels: their number.
        intensities: (channels, sampled voxels), NaN of missing channels.
        thickness_mm: (classes, axes), see `thickness_of`; None for image-level targets.
        content: hash of the image's voxels, see `_content`.
    """

    case: str
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    grid: Grid | None = None
    channels: int = 0
    low: float = 0.0
    high: float = 0.0
    no_data: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()
    spacing_mm: tuple[float, ...] = ()
    flat: bool = False
    oriented: bool = True
    class_voxels: tuple[int, ...] = ()
    ignored_voxels: int = 0
    intensities: np.ndarray | None = None
    thickness_mm: np.ndarray | None = None
    content: str = ""


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
        contents: per case, a hash of the image's voxels; empty where it says nothing, see `_content`.
    """

    spatial_dims: int
    shapes: tuple[tuple[int, ...], ...]
    spacings_mm: tuple[tuple[float, ...], ...]
    intensities: tuple[dict[str, float], ...]
    class_voxels: tuple[tuple[int, ...], ...]
    contents: tuple[str, ...] = ()
    thickness_mm: tuple[tuple[float, ...], ...] = ()


class CheckResult(NamedTuple):
    """Args: warnings: one line each. errors: of each skipped case."""

    fingerprint: Fingerprint
    warnings: list[str]
    errors: dict[str, list[str]]


def samples_per_case(dataset: Dataset) -> int:
    """Voxels of a case whose intensities are sampled."""
    fair_share = _ALL_SAMPLES // max(1, len(dataset.cases))
    return max(_MIN_SAMPLES, min(_MAX_SAMPLES, fair_share))


def check(
    dataset: Dataset,
    workers: int,
    skip: bool = False,
    examine_case: Callable[[Case], CaseReport] | None = None,
) -> CheckResult:
    """Read every file once; the fingerprint is of the valid cases.

    Args:
        skip: skip invalid cases, if at least one is valid.
        examine_case: as in `examine_all`.
    Raises: ValueError: at least one error; the message has a line for each, with case, file and expectation.
    """
    reports = examine_all(dataset, workers, examine_case)
    errors = {r.case: r.errors for r in reports if r.errors}
    valid = [r for r in reports if not r.errors]
    if errors and not (skip and valid):
        raise ValueError(error_report(dataset, errors))
    warnings = [f"case {r.case}: {w}" for r in valid for w in r.warnings]
    return CheckResult(measure(valid), warnings + dataset_warnings(valid, dataset), errors)


def dataset_warnings(reports: Sequence[CaseReport], dataset: Dataset) -> list[str]:
    """What is said once, not for each case."""
    warnings = []
    unoriented = [report.case for report in reports if not report.oriented]
    if unoriented:
        warnings.append(f"{named(unoriented)}: {UNORIENTED}")
    warnings += _no_data_warning(reports)
    warnings += _absent_classes_warning(reports, dataset)
    warnings += _nothing_ignored_warning(reports, dataset)
    shapes = [report.shape for report in reports]
    spacings_mm = [report.spacing_mm for report in reports]
    warnings += lost_spacing(shapes, spacings_mm)
    warnings += far_spacing([report.case for report in reports], spacings_mm)
    warnings += same_images({report.case: report.content for report in reports if report.content})
    return warnings


def _no_data_warning(reports: Sequence[CaseReport]) -> list[str]:
    values = {report.case: report.no_data[0] for report in reports if report.no_data}
    if not values:
        return []
    texts = {f"{value:.6g}" for value in values.values()}
    lowest = ", ".join(sorted(texts)[:3])
    return [
        f"{named(list(values))}: the lowest value ({lowest}) looks like a no-data value, which shifts "
        "the mean and widens the deviation that normalisation takes; replace it, for example by the "
        "value of the background"
    ]


def _absent_classes_warning(reports: Sequence[CaseReport], dataset: Dataset) -> list[str]:
    counts = [report.class_voxels for report in reports if report.class_voxels]
    if not counts or not isinstance(dataset.targets, LabelMapTargets):
        return []
    class_voxels = np.sum(counts, axis=0).tolist()
    names_and_voxels = zip(dataset.class_names, class_voxels, strict=True)
    absent = ", ".join(name for name, num_voxels in names_and_voxels if num_voxels == 0)
    if not absent:
        return []
    return [f"no label map has a voxel of {absent}, which nothing can be learned about"]


def _nothing_ignored_warning(reports: Sequence[CaseReport], dataset: Dataset) -> list[str]:
    ignore = dataset.targets.ignore if isinstance(dataset.targets, SegmentationTargets) else None
    has_labels = any(report.class_voxels for report in reports)
    if ignore is None or not has_labels or any(report.ignored_voxels for report in reports):
        return []
    return [f"no label map has a voxel of the value to ignore, {ignore}"]


def examine_all(
    dataset: Dataset,
    workers: int,
    examine_case: Callable[[Case], CaseReport] | None = None,
) -> list[CaseReport]:
    """A report of every case, in the dataset's order.

    Args:
        examine_case: the report of a case; None: `examine`, which reads its files.
    """
    examine_case = examine_case or partial(examine, dataset=dataset)
    reports = list(each(examine_case, dataset.cases, workers, "checking"))
    readable = [report for report in reports if report.shape]
    num_flat = sum(report.flat for report in readable)
    mostly_flat = 2 * num_flat > len(readable)
    for report in readable:
        if report.flat != mostly_flat:
            report.errors.append(_WRONG_DIMS[report.flat])
    return reports


def error_report(dataset: Dataset, errors: Mapping[str, Sequence[str]]) -> str:
    """One line per error.

    Args:
        errors: case id to its errors.
    """
    lines = []
    for case, messages in errors.items():
        lines += [f"  case {case}: {error}" for error in messages]
    errors_text = "1 error" if len(lines) == 1 else f"{len(lines)} errors"
    return f"dataset {dataset.name}: {errors_text} in {len(dataset.cases)} cases\n" + "\n".join(lines)


def still_invalid(dataset: Dataset, errors: Mapping[str, Sequence[str]]) -> bool:
    """Whether these cases still have the same errors; granting a permission, for example, changes no file."""
    by_id = {case.id: case for case in dataset.cases}
    wrong_dims = set(_WRONG_DIMS.values())
    for case_id, messages in errors.items():
        if case_id not in by_id:
            return False
        if wrong_dims & set(messages):  # said of a case beside the others, so that one alone cannot tell
            continue
        if examine(by_id[case_id], dataset).errors != list(messages):
            return False
    return True


def examine(case: Case, dataset: Dataset) -> CaseReport:
    """Examine the files of one case; errors go into the report, none is raised."""
    report = CaseReport(case.id)
    if case.id in dataset.errors:
        report.errors.append(dataset.errors[case.id])
        return report
    if isinstance(dataset.targets, ImageLevelTargets):
        _examine_image_level(case, dataset.targets, dataset, report)
        return report
    image = _read(_image, case, dataset, report)
    label = _read(_label, case, dataset, report)
    if image is not None and label is not None:
        _describe(image, label, dataset, report)
    if report.intensities is not None and case.missing_channels:
        report.intensities[list(case.missing_channels)] = np.nan
    return report


def _examine_image_level(
    case: Case,
    targets: ImageLevelTargets,
    dataset: Dataset,
    report: CaseReport,
) -> None:
    image = _read(_image, case, dataset, report)
    error_text = "has no values" if case.values is None else targets.invalid_reason(case.values)
    if error_text:
        report.errors.append(error_text)
    if image is not None:
        _describe_image_level(case, image, dataset, report)


def _read(
    read: Callable[[Case, Dataset, CaseReport], np.ndarray],
    case: Case,
    dataset: Dataset,
    report: CaseReport,
) -> np.ndarray | None:
    """The voxels of a file; None if it cannot be read, with the error in the report."""
    try:
        return read(case, dataset, report)
    except ValueError as error:
        report.errors.append(str(error))
        return None


def _describe_image_level(case: Case, voxels: np.ndarray, dataset: Dataset, report: CaseReport) -> None:
    assert report.grid is not None
    canonical, report.spacing_mm = to_canonical(voxels, report.grid)
    report.flat = report.grid.shape[2] == 1
    report.shape = canonical.shape[1:]
    report.content = _content(canonical, report)
    if case.split != "test":  # nothing may be learned from test cases
        report.intensities = _sample(voxels, samples_per_case(dataset))


def _content(canonical: np.ndarray, report: CaseReport) -> str:
    """A hash by which the same image is found under two ids, whatever its format, type and axis order.

    Empty if the image is constant: many such images may be equal by chance.
    Shape: (channels, R, A, S).
    """
    if report.low == report.high:
        return ""
    digest = blake2b(digest_size=8, key=repr(canonical.shape).encode())
    for channel in canonical:
        digest.update(np.ascontiguousarray(channel).data)  # a copy of turned axes alone
    return digest.hexdigest()


def _sample(image: np.ndarray, count: int) -> np.ndarray:
    """Voxels spread evenly over the image: (channels, X, Y, Z) -> (channels, about `count`)."""
    flat = image.reshape(len(image), -1)
    step = max(1, flat.shape[1] // count)
    return flat[:, ::step].copy()


def _image(case: Case, dataset: Dataset, report: CaseReport) -> np.ndarray:
    """The image of a case. Raises: ValueError: it cannot be read."""
    image, grid = image_of(case)
    path = case.images[0]
    if len(image) != len(dataset.modalities):
        names = ", ".join(dataset.modalities)
        report.errors.append(f"{path}: expected the channels {names}, found {len(image)} channels")
    present = np.delete(image, case.missing_channels, axis=0) if case.missing_channels else image
    odd = sum(int((~np.isfinite(plane)).sum()) for channel in present for plane in channel)
    if odd:
        report.errors.append(f"{path}: {odd} voxels are NaN or infinite, expected finite numbers")
    ranges = [(float(channel.min()), float(channel.max())) for channel in present]
    if not odd:
        report.errors += [f"{path}: {error}" for error in map(range_error, present) if error]
        report.warnings += [f"{path}: {pair}" for pair in repeated_slices(present)]
    if any(wrapped_negatives(channel, *low_high) for channel, low_high in zip(present, ranges, strict=True)):
        report.warnings.append(
            f"{path}: values near 0 and near 65535, none between; negative values may be stored as unsigned"
        )
    if any(low == high for low, high in ranges):
        report.warnings.append(f"{path}: a channel is constant")
    report.no_data = tuple(low for low, high in ranges if is_no_data(low, high))
    report.low = min(low for low, _ in ranges)
    report.high = max(high for _, high in ranges)
    if grid.shape[2] > 1 == min(grid.shape):
        report.errors.append(
            f"{path}: shape {grid.shape}, expected several slices along each axis; a 2D image has its one "
            "slice along the third axis"
        )
    report.grid = grid
    report.channels = len(image)
    for image_path in case.images:
        report.warnings += header_doubts(image_path)
    report.oriented = not any(map(lacks_orientation, case.images))
    if grid.shear > _MAX_SHEAR:
        shear = f"{grid.shear:.1f} degrees off a right angle"
        report.warnings.append(f"{path}: its axes are {shear}; it is used as it is")
    return image


def _label(case: Case, dataset: Dataset, report: CaseReport) -> np.ndarray:
    """The label map of a case. Raises: ValueError: it cannot be read, or is not on the image's grid."""
    label, grid = label_of(case)
    assert case.label is not None
    for path in filter(None, case.label_files):
        report.warnings += header_doubts(path)
    if rtstruct.structures_of(case.label):
        report.warnings += rtstruct.missing_slices(case.label, case.images[0], grid)
    num_classes = len(dataset.class_names)
    ignore = dataset.targets.ignore
    counts = value_counts(label)
    if ignore is not None and ignore < len(counts):
        report.ignored_voxels = int(counts[ignore])
        counts[ignore] = 0
    undeclared = (num_classes + np.flatnonzero(counts[num_classes:])).tolist()
    if undeclared:
        also = "" if ignore is None else f", and {ignore} to be ignored"
        expected = f"expected 0 to {num_classes - 1}{also}"
        report.errors.append(f"{case.label}: label values {undeclared} are not declared, {expected}")
    if not counts.any():
        report.warnings.append(f"{case.label}: every voxel has the value to ignore")
    elif not counts[1:].any():
        report.warnings.append(f"{case.label}: no foreground, every voxel is background")
    elif not counts[0]:
        report.warnings.append(f"{case.label}: no background, every voxel is foreground")
    # Values that are not declared are an error of the case, and of no class.
    report.class_voxels = tuple(np.pad(counts, (0, num_classes))[:num_classes].tolist())
    if report.grid is not None:
        label = on_grid(label, case.images[0], report.grid, case.label, grid)
    return label


def _describe(image: np.ndarray, label: np.ndarray, dataset: Dataset, report: CaseReport) -> None:
    assert report.grid is not None
    report.flat = report.grid.shape[2] == 1
    canonical, report.spacing_mm = to_canonical(image, report.grid)
    report.content = _content(canonical, report)
    report.shape = tuple(s.stop - s.start for s in content_box(canonical))
    if are_picture_channels(dataset.modalities):
        report.intensities = _sample(image, samples_per_case(dataset))
    canonical_label, _ = to_canonical(label[None], report.grid)
    report.thickness_mm = thickness_of(canonical_label[0], report.class_voxels, report.spacing_mm)
    if report.intensities is None:
        report.intensities = _sample_foreground(image, label, dataset)


def _sample_foreground(image: np.ndarray, label: np.ndarray, dataset: Dataset) -> np.ndarray:
    """Voxels spread evenly over the foreground, of an empty label map over all labelled voxels.

    Shape: (channels, X, Y, Z) -> (channels, about `samples_per_case`).
    """
    stored = in_c_order(label.T)  # in file order, the first axis fastest
    is_labelled = np.True_ if dataset.targets.ignore is None else stored != dataset.targets.ignore
    voxel_indices = np.flatnonzero((stored > 0) & is_labelled)
    if not len(voxel_indices):
        voxel_indices = np.flatnonzero(np.broadcast_to(is_labelled, stored.shape))
    step = max(1, len(voxel_indices) // samples_per_case(dataset))
    z, y, x = np.unravel_index(voxel_indices[::step], stored.shape)
    return np.stack([channel[x, y, z] for channel in image])


def thickness_of(label: np.ndarray, class_voxels: Sequence[int], spacing_mm: Sequence[float]) -> np.ndarray:
    """How thick the structures of each class are along each axis: the mean length of their runs of voxels.

    A ball of diameter d has 2/3 d, a plate across an axis its thickness. Components count by their number of
    runs, so many small lesions are not hidden by a large one.

    Shape: label (X, Y, Z) -> (classes, axes), in mm; 0 for a class without voxels.
    Args:
        class_voxels: one count per class, the background's first. Higher label values do not count.
    """
    num_classes = len(class_voxels)
    thickness = np.zeros((num_classes, label.ndim))
    for axis, voxel_mm in enumerate(spacing_mm):
        num_runs = np.zeros(num_classes, np.int64)
        before = (slice(None),) * axis
        first_row = label[*before, :1]
        begins_run = label[*before, 1:] != label[*before, :-1]
        for values in (first_row.ravel(), label[*before, 1:][begins_run]):
            num_runs += np.bincount(values, minlength=num_classes)[:num_classes]
        thickness[:, axis] = voxel_mm * np.array(class_voxels) / np.maximum(num_runs, 1)
    return thickness


def _typical_thickness(reports: Sequence[CaseReport]) -> tuple[tuple[float, ...], ...]:
    """Per foreground class, the median of the cases that have it, mm."""
    measured = [report.thickness_mm for report in reports if report.thickness_mm is not None]
    if not measured:
        return ()
    by_class = np.stack(measured, axis=1)[1:]  # (foreground classes, cases, axes)
    rows = []
    for of_cases in by_class:
        present = of_cases[of_cases[:, 0] > 0]
        row = np.median(present, axis=0) if len(present) else np.zeros(of_cases.shape[1])
        rows.append(tuple(round(float(mm), 4) for mm in row))
    return tuple(rows)


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
    intensities = []
    for channel, known in zip(wide(np.where(is_known, samples, 0)), is_known, strict=True):
        values = channel[known]
        low, high = np.percentile(values, [0.5, 99.5])
        statistics = (low, high, values.mean(), values.std())  # in the order of INTENSITIES
        intensities.append(dict(zip(INTENSITIES, map(float, statistics), strict=True)))
    return Fingerprint(
        spatial_dims=spatial_dims,
        shapes=tuple(r.shape[:spatial_dims] for r in reports),
        spacings_mm=tuple(r.spacing_mm[:spatial_dims] for r in reports),
        intensities=tuple(intensities),
        class_voxels=tuple(r.class_voxels for r in reports),
        contents=tuple(r.content for r in reports) if any(r.content for r in reports) else (),
        thickness_mm=tuple(row[:spatial_dims] for row in _typical_thickness(reports)),
    )
