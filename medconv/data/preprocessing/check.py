"""Check every file of a dataset, report all errors at once, and measure its fingerprint in the same pass."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from medconv.data.case import Case, Dataset
from medconv.data.io.images import UNORIENTED
from medconv.data.preprocessing.doubts import far_spacing, lost_spacing, named, same_images
from medconv.data.preprocessing.examine import CaseReport, examine
from medconv.data.preprocessing.fingerprint import Fingerprint, measure
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.threads import each

_WRONG_DIMS = {
    True: "one slice only, while most cases are volumes",
    False: "a volume, while most cases are one slice only",
}


class CheckResult(NamedTuple):
    """Args: warnings: one line each. errors: of each skipped case."""

    fingerprint: Fingerprint
    warnings: list[str]
    errors: dict[str, list[str]]


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
    dataset: Dataset, workers: int, examine_case: Callable[[Case], CaseReport] | None = None
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
