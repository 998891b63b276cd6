"""`medconv preprocess`: checks and preprocesses a dataset before training."""

import argparse
from collections.abc import Sequence

import numpy as np

from medconv import config
from medconv.config import RunConfig, compose
from medconv.data.case import Dataset
from medconv.data.preprocessing.fingerprint import (
    CaseReport,
    dataset_warnings,
    error_report,
    examine_all,
    measure,
)
from medconv.planning import report as planning_report
from medconv.targets.image_level import ImageLevelTargets
from medconv.training.data_setup import (
    check_split,
    find_data,
    prepare_data,
    split_cases,
)
from medconv.training.plan_setup import make_plan
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import size_text, start_logging


def run_command(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """`medconv preprocess`. Args: arguments: for Hydra. Returns: the exit code."""
    start_logging()
    configs: list[RunConfig] = []
    compose.run_with_config(lambda composed, _: configs.append(config.validate(composed)), arguments)
    codes = [_check(one) if options.check_only else _prepare(one, options.verify) for one in configs]
    return max(codes, default=DONE)


def _prepare(run_config: RunConfig, verify: bool) -> int:
    prepared = prepare_data(run_config, verify)
    store, planned = prepared.store, prepared.plan
    print(
        f"{'verified' if verify else 'prepared'}  {len(prepared.dataset.cases)} cases of "
        f"{prepared.dataset.name}"
    )
    print(f"store     {store.folder}, {store.size() / 1e6:.1f} MB")
    print(f"findings  {store.folder.parent / 'fingerprint.json'}")
    spacing, patch = size_text(np.round(planned.spacing_mm, 3)), size_text(planned.patch_size)
    print(f"plan      spacing {spacing} mm, patch {patch} voxels")
    return DONE


def _check(run_config: RunConfig) -> int:
    """Checks all cases without writing. Raises: ValueError: some are invalid; lists all errors."""
    dataset, workers = find_data(run_config.data)
    reports = examine_all(dataset, workers)
    print(table(dataset, reports))
    for report in reports:
        for warning in report.warnings:
            print(f"warning: case {report.case}: {warning}")
    for warning in dataset_warnings([report for report in reports if not report.errors], dataset):
        print(f"warning: {warning}")
    errors = {report.case: report.errors for report in reports if report.errors}
    if errors:
        raise ValueError(error_report(dataset, errors))
    measured = measure(reports)
    check_split(split_cases(dataset, run_config.data), dataset, measured, run_config.data)
    print(f"\n{planning_report.table(make_plan(run_config, dataset, measured).rows)}")
    print(f"\nno errors in {len(reports)} cases of {dataset.name}")
    return DONE


def table(dataset: Dataset, reports: list[CaseReport]) -> str:
    """One line per case: grid, intensities, share of each foreground class or the image-level label."""
    names = _shown_names(dataset)
    head = ["case", "shape", "spacing mm", "axes", "channels", "intensities", *names, ""]
    values = {case.id: _values(case.values, dataset) for case in dataset.cases}
    rows = [head, *[_row(report, values[report.case]) for report in reports]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shown_names(dataset: Dataset) -> tuple[str, ...]:
    """Without the background, which is the rest."""
    return dataset.class_names[0 if isinstance(dataset.targets, ImageLevelTargets) else 1 :]


def _values(values: tuple[float, ...] | None, dataset: Dataset) -> list[str]:
    """The image-level label of a case, one cell per name; dashes if there is none."""
    if isinstance(dataset.targets, ImageLevelTargets) and values is not None:
        return dataset.targets.cells_per_name(values)
    return ["-"] * len(_shown_names(dataset))


def _row(report: CaseReport, values: list[str]) -> list[str]:
    grid, cells = report.grid, ["-"] * 5
    if grid is not None:
        spacing = size_text(np.round(grid.spacing_mm, 3))
        cells = [size_text(grid.shape), spacing, grid.orientation, str(report.channels)]
        cells.append(f"{report.low:.4g} to {report.high:.4g}")
    total = sum(report.class_voxels)
    shares = [f"{100 * n / total:.2f} %" for n in report.class_voxels[1:]] or values
    return [report.case, *cells, *shares, f"{len(report.errors)} errors" if report.errors else ""]
