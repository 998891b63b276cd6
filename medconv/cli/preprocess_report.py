"""What `medconv preprocess` prints about a dataset, its plan and its errors."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medconv.config import RunConfig
from medconv.data.case import Case, Dataset
from medconv.data.preprocessing.check import (
    assumed_spacing,
    case_warnings,
    dataset_warnings,
    error_report,
    examine_all,
)
from medconv.data.preprocessing.dataset_cache import dataset_folder, examined
from medconv.data.preprocessing.examine import CaseReport
from medconv.data.preprocessing.fingerprint import measure
from medconv.planning import report as planning_report
from medconv.training.data_setup import find_data, flip_label_pairs, planned_data, prepare_data, split_cases
from medconv.training.plan_setup import make_plan
from medconv.training.weight_source import weight_source
from medconv.utils.logging import size_text

_MAX_COLUMNS = 8  # of classes


def preprocess(configs: Sequence[RunConfig], *, checks_only: bool, verifies: bool) -> None:
    """Prepare or check the dataset of each config, and print what is there.

    Args:
        checks_only: prepare nothing.
        verifies: compare prepared files with their checksums.
    Raises:
        ValueError: of the checks: some cases are invalid; lists all errors.
    """
    for run_config in configs:
        if run_config.init.pretrained is not None:
            run_config = weight_source(run_config.init.pretrained).settings(run_config)
        if checks_only:
            _check(run_config)
        else:
            _prepare(run_config, verifies)


def _prepare(run_config: RunConfig, verify: bool) -> None:
    prepared = prepare_data(run_config, verify)
    store = prepared.store
    verb = "verified" if verify else "prepared"
    spacing = size_text(np.round(prepared.plan.spacing_mm, 3))
    patch_size = size_text(prepared.plan.patch_size)
    print(f"{verb}  {len(prepared.dataset.cases)} cases of {prepared.dataset.name}")
    print(f"store     {store.folder}, {store.size() / 1e6:.1f} MB")
    print(f"findings  {store.folder.parent / 'fingerprint.json'}")
    print(f"plan      spacing {spacing} mm, patch {patch_size} voxels")


def _check(run_config: RunConfig) -> None:
    """Checks all cases; those that were read before and have not changed are not read again.

    Raises:
        ValueError: some are invalid; lists all errors.
    """
    dataset = find_data(run_config.data)
    flip_label_pairs(dataset, run_config.data)
    workers = run_config.data.prepare_workers
    folder = dataset_folder(Path(run_config.data.cache_dir), dataset)
    reports = examine_all(dataset, workers, examined(dataset, folder, workers))
    print(table(dataset, reports))
    _print_warnings(dataset, reports)
    errors = {report.case: report.errors for report in reports if report.errors}
    if errors:
        raise ValueError(error_report(dataset, errors))
    measured = measure(reports)
    try:
        split_cases(dataset, run_config.data)
    except ValueError:  # of a few cases; they have a plan nevertheless
        if run_config.data.source_spacing_mm is None:
            assumed = assumed_spacing(measured.shapes, measured.spacings_mm, dataset.targets)
            measured = measured.at_spacing(assumed)
        print(f"\n{planning_report.table(make_plan(run_config, dataset, measured).rows)}")
        raise
    planned_data(run_config, dataset, measured, skipped={}, earlier_plan=None)
    print(f"\nno errors in {len(reports)} cases of {dataset.name}")


def _print_warnings(dataset: Dataset, reports: Sequence[CaseReport]) -> None:
    valid = [report for report in reports if not report.errors]
    for warning in case_warnings(reports) + dataset_warnings(valid, dataset):
        print(f"warning: {warning}")


def table(dataset: Dataset, reports: list[CaseReport]) -> str:
    """One line per case: grid, intensities, share of each foreground class or the image-level label.

    Many classes have lines of their own, below.
    """
    names = _label_names(dataset)
    has_lines = len(names) > _MAX_COLUMNS and any(report.class_voxels for report in reports)
    label_head = ["foreground", "classes"] if has_lines else names
    head = ["case", "shape", "spacing mm", "axes", "channels", "intensities", *label_head, ""]
    rows = [head]
    for report, case in zip(reports, dataset.cases, strict=True):
        labels = _foreground_cells(report, len(names)) if has_lines else _label_cells(report, case, dataset)
        count = len(report.errors)
        errors = f"{count} error{'s' * (count > 1)}" if count else ""
        rows.append([report.case, *_grid_cells(report), *labels, errors])
    text = _aligned(rows)
    return f"{text}\n\n{_aligned(_class_rows(names, reports))}" if has_lines else text


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _label_names(dataset: Dataset) -> tuple[str, ...]:
    """Classes without the background, which is what the others leave, or the labels of whole images."""
    first = 1 if dataset.targets.per_voxel else 0
    return dataset.class_names[first:]


def _label_cells(report: CaseReport, case: Case, dataset: Dataset) -> list[str]:
    """The share of each class, or the image-level label, one cell per name; dashes if there is none."""
    if report.class_voxels:
        return [_percent(share) for share in _shares(report)[1:]]
    if case.values is not None:
        return dataset.targets.cells_per_name(case.values)
    return ["-"] * len(_label_names(dataset))


def _foreground_cells(report: CaseReport, num_classes: int) -> list[str]:
    if not report.class_voxels:
        return ["-", "-"]
    background, *foreground = _shares(report)
    return [_percent(1 - background), f"{np.count_nonzero(foreground)} of {num_classes}"]


def _class_rows(names: Sequence[str], reports: Sequence[CaseReport]) -> list[list[str]]:
    """Of each class in how many cases it is, and its median share of these."""
    shares = np.array([_shares(report)[1:] for report in reports if report.class_voxels])
    rows = [["class", "cases", "median share"]]
    for name, of_class in zip(names, shares.T, strict=True):
        present = of_class[of_class > 0]
        rows.append([name, str(len(present)), _percent(np.median(present)) if len(present) else "-"])
    return rows


def _shares(report: CaseReport) -> np.ndarray:
    """Of all labelled voxels. Shape: (classes with the background,)."""
    voxels = np.array(report.class_voxels, np.float64)
    shares: np.ndarray = voxels / max(1, voxels.sum())  # a case may have no labelled voxel
    return shares


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _grid_cells(report: CaseReport) -> list[str]:
    """Shape, spacing, axes, channels and intensities; dashes if the image cannot be read."""
    if report.grid is None:
        return ["-"] * 5
    return [
        size_text(report.grid.shape),
        size_text(np.round(report.grid.spacing_mm, 3)),
        report.grid.orientation,
        str(report.channels),
        f"{report.low:.4g} to {report.high:.4g}",
    ]
