"""Check every file of a dataset, report all errors at once, and measure its fingerprint in the same pass."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from medconv.data.case import Case, Dataset, Grid
from medconv.data.io.images import UNORIENTED
from medconv.data.preprocessing.examine import REPORT_VERSION, CaseReport, examine, samples_per_case
from medconv.data.preprocessing.fingerprint import Fingerprint, measure
from medconv.data.preprocessing.store import signature
from medconv.data.preprocessing.value_bands import ADAPTING, advice, far_cases, row_text
from medconv.targets import Targets
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.logging import size_text, some
from medconv.utils.progress import each

_WRONG_DIMS = {
    True: "one slice only, while most cases are volumes",
    False: "a volume, while most cases are one slice only",
}
_FEW = 5  # times fewer slices than rows in every case, at 1 x 1 x 1 mm
_ASSUMED_MM = 7.0  # of such slices; in sets with headers they are 4 to 15 times as thick as voxels are long
_FAR_SPACING = 5  # times the median spacing of all cases, or a fifth of it
_NAMED = 5  # cases in a message
_FILE = "examined.jsonl"
_ARRAYS = ("intensities", "thickness_mm")


class CheckResult(NamedTuple):
    """Args: warnings: one line each. errors: of each skipped case."""

    fingerprint: Fingerprint
    warnings: list[str]
    errors: dict[str, list[str]]


def check(
    dataset: Dataset,
    workers: int | None = None,
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
    return CheckResult(measure(valid), case_warnings(valid) + dataset_warnings(valid, dataset), errors)


def case_warnings(reports: Sequence[CaseReport]) -> list[str]:
    """What is odd in a case, a line for each; one line where many cases have the same, which is likely right,
    such as no foreground where most people are healthy.
    """
    cases_of: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)  # text behind the file to case
    for report in reports:
        for warning in report.warnings:
            _, _, text = warning.partition(": ")
            cases_of[text].setdefault(report.case, []).append(warning)
    lines = []
    for text, cases in cases_of.items():
        if len(cases) > _NAMED:
            file, _, _ = next(iter(cases.values()))[0].partition(": ")
            lines.append(f"{named(list(cases))}: {text}; the first is {file}")
        else:
            lines += [f"case {case}: {warning}" for case, texts in cases.items() for warning in texts]
    return lines


def dataset_warnings(reports: Sequence[CaseReport], dataset: Dataset) -> list[str]:
    """What is said once, not for each case."""
    warnings = []
    unoriented = [report.case for report in reports if not report.oriented]
    if unoriented:
        warnings.append(f"{named(unoriented)}: {UNORIENTED}")
    no_data = {report.case: report.no_data[0] for report in reports if report.no_data}
    if no_data:
        texts = {f"{value:.6g}" for value in no_data.values()}
        lowest = ", ".join(sorted(texts)[:3])
        warnings.append(
            f"{named(list(no_data))}: the lowest value ({lowest}) looks like a no-data value, which shifts "
            "the mean and widens the deviation that normalisation takes; replace it, for example by the "
            "value of the background"
        )
    counts = [report.class_voxels for report in reports if report.class_voxels]
    if counts and isinstance(dataset.targets, LabelMapTargets):
        names_and_voxels = zip(dataset.class_names, np.sum(counts, axis=0).tolist(), strict=True)
        absent = ", ".join(name for name, num_voxels in names_and_voxels if num_voxels == 0)
        if absent:
            warnings.append(f"no label map has a voxel of {absent}, which nothing can be learned about")
    ignore = dataset.targets.ignore if isinstance(dataset.targets, SegmentationTargets) else None
    if ignore is not None and counts and not any(report.ignored_voxels for report in reports):
        warnings.append(f"no label map has a voxel of the value to ignore, {ignore}")
    shapes = [report.shape for report in reports]
    spacings_mm = [report.spacing_mm for report in reports]
    if not any(case.source_spacing_mm for case in dataset.cases):
        warnings += lost_spacing(shapes, spacings_mm, dataset.targets)
    warnings += far_spacing([report.case for report in reports], spacings_mm)
    warnings += same_images({report.case: report.content for report in reports if report.content})
    return warnings


def examine_all(
    dataset: Dataset, workers: int | None, examine_case: Callable[[Case], CaseReport] | None = None
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
    """One line per error."""
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


def lost_spacing(
    shapes: Sequence[Sequence[int]], spacings_mm: Sequence[Sequence[float]], targets: Targets | None = None
) -> list[str]:
    """A warning if the headers have probably lost the spacing; else none."""
    assumed = assumed_spacing(shapes, spacings_mm, targets)
    if assumed is None:
        return []
    few = int(np.median([min(shape) for shape in shapes]))
    many = int(np.median([max(shape) for shape in shapes]))
    return [
        f"all {len(shapes)} volumes have 1 x 1 x 1 mm, but {few} slices of {many} rows: their headers have "
        f"probably lost the spacing, so {size_text(assumed)} mm is taken in its place; correct the headers, "
        "or set source_spacing_mm to the true spacing, such as [1.25,1.25,10] (right, anterior, superior), "
        "or to [1,1,1] if the headers are right"
    ]


def assumed_spacing(
    shapes: Sequence[Sequence[int]], spacings_mm: Sequence[Sequence[float]], targets: Targets | None = None
) -> list[float] | None:
    """The spacing to plan by where every volume has 1 x 1 x 1 mm and far fewer slices than rows; else None.

    Only its proportions matter: slices are thick, as in all sets of that shape, so that kernels, strides and
    rotations treat them so. Targets in mm of the headers would lie elsewhere, and keep theirs.
    """
    if targets is not None and targets.labels_in_mm:
        return None
    thin = [len(shape) == 3 and max(shape) >= _FEW * min(shape) and min(shape) > 1 for shape in shapes]
    unit = [tuple(spacing) == (1.0, 1.0, 1.0) for spacing in spacings_mm]
    if not thin or not all(thin) or not all(unit):
        return None
    axis = int(np.argmin(np.median(shapes, axis=0)))
    return [_ASSUMED_MM if index == axis else 1.0 for index in range(3)]


def far_spacing(cases: Sequence[str], spacings_mm: Sequence[Sequence[float]]) -> list[str]:
    """A warning if cases have voxels several times as long as the median case, or as short; else none.

    Such headers are often wrong, in metres or pixels, and resampling makes those images huge or tiny.
    """
    if not cases:
        return []
    spacings = np.array(spacings_mm)
    median = np.median(spacings, axis=0)
    ratio = spacings / median
    is_far = ((ratio > _FAR_SPACING) | (ratio < 1 / _FAR_SPACING)).any(axis=1)
    if not is_far.any():
        return []
    far_cases = [case for case, far in zip(cases, is_far, strict=True) if far]
    example = " x ".join(f"{mm:.4g}" for mm in spacings[is_far][0])
    usual = " x ".join(f"{mm:.4g}" for mm in median)
    return [
        f"{named(far_cases)}: spacing {example} mm, where the median of all {len(cases)} cases is {usual} "
        "mm; if the headers are wrong, correct them or set source_spacing_mm for these cases"
    ]


def far_values(dataset: Dataset, measured: Fingerprint, normalisation: Sequence[str]) -> list[str]:
    """A warning for each channel in which cases have values far from those of all others.

    Args:
        measured: of all cases of `dataset`.
        normalisation: of each channel; those that adapt to an image are left out.
    """
    warnings = []
    for channel, name in enumerate(normalisation):
        if name in ADAPTING or not measured.percentiles:
            continue
        rows = [case[channel] for case in measured.percentiles]
        for index, others in far_cases(rows):
            of_channel = f" of channel {dataset.modalities[channel]}" if len(normalisation) > 1 else ""
            warnings.append(
                f"case {dataset.cases[index].id}: most values{of_channel} are from {row_text(rows[index])}, "
                f"in the other {others.cases} cases from {others.text()}; {advice(name)}"
            )
    return warnings


def same_images(contents: Mapping[str, str]) -> list[str]:
    """A warning that names cases with one image; none if all images differ.

    Args:
        contents: case id to a hash of its image.
    """
    by_content: defaultdict[str, list[str]] = defaultdict(list)
    for case_id, content in contents.items():
        by_content[content].append(case_id)
    groups = [" = ".join(cases) for cases in by_content.values() if len(cases) > 1]
    if not groups:
        return []
    return [
        f"cases with the same image: {some(groups)}; where one of them is in validation or test, training "
        "skips the others"
    ]


def named(cases: Sequence[str]) -> str:
    """Such as `7 cases (a, b, c, d, e, ...)`."""
    text = ", ".join(cases[:_NAMED]) + (", ..." if len(cases) > _NAMED else "")
    return f"{len(cases)} case{'s' if len(cases) > 1 else ''} ({text})"


class Examined:
    """The reports of a dataset, a line of JSON each. A line is added as soon as a case was read, so a check
    that was stopped goes on where it was. Cases with errors are always read again: granting a permission, for
    example, changes no file.

    Args:
        folder: of the dataset, in the cache. Where it cannot be written, nothing is remembered.
    """

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self._dataset = dataset
        self._path = folder / _FILE
        self._lock = Lock()
        self._can_write = True
        without_cases = replace(dataset, cases=(), errors={})
        self._depends_on = [REPORT_VERSION, samples_per_case(dataset), repr(without_cases)]
        self._lines: dict[str, str] = {}  # by key; the last line of the file counts
        self._bytes_read = 0
        self._read_lines()

    def examine(self, case: Case) -> CaseReport:
        """As `examine`."""
        # Before reading: if the files change meanwhile, they are read again next time.
        files = signature(case)
        # A hash of all that a report depends on; "" if the files cannot be examined.
        content = json.dumps([*self._depends_on, files, repr(case)])
        key = "" if files is None else hashlib.sha256(content.encode()).hexdigest()[:24]
        if case.id not in self._dataset.errors:
            if key not in self._lines:
                self._read_lines()
            report = _report(self._lines.get(key, ""))
            if report is not None:
                return report
        report = examine(case, self._dataset)
        if key and not report.errors:
            self._add(key, report)
        return report

    def _read_lines(self) -> None:
        """Those that were added since; other processes may be at work, too."""
        with self._lock, suppress(OSError), self._path.open("rb") as file:
            file.seek(self._bytes_read)
            content = file.read()
            self._bytes_read += len(content)
            for line in content.decode(errors="replace").splitlines():
                key, _, text = line.partition(" ")
                self._lines[key] = text

    def _add(self, key: str, report: CaseReport) -> None:
        content = asdict(report)
        for name in _ARRAYS:
            array = content[name]
            if array is not None:
                data = base64.b64encode(array.tobytes()).decode()
                content[name] = [array.dtype.str, list(array.shape), data]
        # It begins a line, since a full disk may have cut the one before.
        line = f"\n{key} {json.dumps(content)}"
        with self._lock:
            if not self._can_write:
                return
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # In one piece, since other processes may add lines, too.
                with self._path.open("ab", buffering=0) as file:
                    file.write(line.encode())
            except OSError:
                self._can_write = False


def _report(line: str) -> CaseReport | None:
    """None: the line was cut by a full disk or a power failure."""
    try:
        content = json.loads(line)
        content["grid"] = content["grid"] and Grid.from_plain(content["grid"])
        for name in _ARRAYS:
            if content[name] is not None:
                dtype, shape, data = content[name]
                # A copy, since an array of bytes cannot be changed.
                content[name] = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
        for name in ("no_data", "shape", "spacing_mm", "class_voxels"):
            content[name] = tuple(content[name])
        content["percentiles"] = tuple(map(tuple, content["percentiles"]))
        return CaseReport(**content)
    except (ValueError, TypeError, KeyError):
        return None
