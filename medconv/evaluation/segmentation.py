"""`medconv evaluate`: predicted against reference label maps, or image-level predictions against labels.

Prints a table, and writes all results as JSON, the cases as CSV, and a report as HTML.
"""

from __future__ import annotations

import argparse
import csv
import errno
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.io.images import check_same_grid, in_folder, read_label
from medconv.data.io.raster import check_ignored
from medconv.evaluation import image_level, labels
from medconv.evaluation.image_level_report import write_report as write_image_level_report
from medconv.evaluation.labels import recorded_images
from medconv.evaluation.overlays import images_of
from medconv.evaluation.segmentation_report import write_report
from medconv.inference.output_table import TABLE
from medconv.metrics import dice as metrics_dice
from medconv.metrics import statistics
from medconv.metrics.dice import ClassScores
from medconv.metrics.segmentation import METRICS, VOLUMES, measure
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.atomic_io import write_text
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import shown, start_logging
from medconv.utils.threads import each

_IMAGE_LEVEL_OPTIONS = ("label_columns", "split", "split_column")
_COLUMNS = (*(metric.name for metric in METRICS), *VOLUMES)


def run_command(options: argparse.Namespace) -> int:
    """`medconv evaluate` with these options. Returns: the exit code."""
    start_logging()
    if options.output.suffix != ".json":
        raise ValueError(
            f"--output {options.output}: expected a JSON file; CSV and HTML are written beside it"
        )
    if options.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {options.workers}")
    if options.labels is not None or options.predictions.suffix == ".csv":
        return _run_image_level(options)
    if options.references is None:
        raise ValueError(
            "--references is needed: the folder of reference label maps; for classification and regression, "
            "--labels: a table"
        )
    if wrong := [f"--{name.replace('_', '-')}" for name in _IMAGE_LEVEL_OPTIONS if getattr(options, name)]:
        raise ValueError(
            f"{wrong[0]} is for classification and regression, whose --predictions is a table (.csv)"
        )
    if options.images:  # fail before the work
        cases = list(in_folder(options.predictions, "--predictions"))
        images_of(options.predictions, options.references, options.images, cases)
    tolerance_mm = labels.tolerances(options.tolerance_mm)
    _check_writable(options.output)
    result = evaluate(options.predictions, options.references, options.compare, tolerance_mm, options.workers)
    write(result, options.output)
    print(shown(table(result)))
    write_text(options.output.with_suffix(".html"), report(result, options.images))
    _print_paths(options.output)
    return DONE


def _run_image_level(options: argparse.Namespace) -> int:
    if options.labels is None or options.references is not None or options.tolerance_mm:
        raise ValueError(
            f"--predictions {options.predictions}: image-level predictions are measured against "
            "--labels, a table (.csv), without --references and --tolerance-mm"
        )
    if options.predictions.is_dir():
        options.predictions = options.predictions / TABLE
    _check_writable(options.output)
    columns = (options.label_columns, options.split, options.split_column or "split")
    result = image_level.evaluate(options.predictions, options.labels, options.compare, *columns)
    image_level.write(result, options.output)
    print(shown(image_level.table(result)))
    images = {case: Path(path) for case, path in result["images"].items()} | recorded_images(
        options.predictions.parent
    )
    if options.images:
        in_images = in_folder(options.images, "--images")
        images = {row["case"]: in_images[row["case"]] for row in result["cases"] if row["case"] in in_images}
    write_text(options.output.with_suffix(".html"), write_image_level_report(result, images))
    _print_paths(options.output)
    return DONE


def _print_paths(output: Path) -> None:
    print(f"\nper case: {output} and {output.with_suffix('.csv')}")
    print(f"report:   {output.with_suffix('.html')}")


def evaluate(
    predictions: Path,
    references: Path,
    compare: Path | None = None,
    tolerance_mm: Mapping[str | None, float] | None = None,
    workers: int = 1,
) -> dict[str, Any]:
    """Measure every prediction against the reference of the same name; with `compare`, those of a second
    folder too.

    Args: tolerance_mm: of the surface Dice, by class; None stands for all other classes. workers: cases
        measured at once.
    Returns: `mean` (metric to value), `per_class` (class to metric to mean), `statistics` (class to metric to
        what `statistics.describe` returns), `cases` (one row each: metric to class to value),
        `without_prediction` (references without a prediction), `tolerance_mm`; with `compare` also `compare`
        (the same for the other predictions) and `comparison`.
    Raises: ValueError: a folder without label maps, predictions without a reference, or label maps that
        cannot be measured; names all.
    """
    sets = [(predictions, "--predictions")] + ([(compare, "--compare")] if compare else [])
    predicted = [in_folder(folder, option) for folder, option in sets]
    reference_paths = in_folder(references, "--references")
    missing = sorted({case for paths in predicted for case in paths} - set(reference_paths))
    if missing:
        raise ValueError(f"--references {references}: no label map there for {', '.join(missing[:20])}")
    targets = labels.agreed_targets([folder for folder, _ in sets], references)
    tolerance = labels.Tolerance(tolerance_mm or {})
    if targets:
        tolerance.checked(targets.names)  # fail before the work
        check_ignored(targets.ignore, reference_paths.values())
    rows = [_measured(paths, reference_paths, targets, tolerance, workers) for paths in predicted]
    targets = targets or labels.numbered({name for cases in rows for row in cases for name in row["dice"]})
    summaries = [
        _summary(folder, cases, targets.names) for (folder, _), cases in zip(sets, rows, strict=True)
    ]
    result = {**summaries[0], "references": str(references), "targets": targets.plain()}
    result |= {
        "tolerance_mm": tolerance.checked(targets.names),
        "without_prediction": sorted(set(reference_paths) - set(predicted[0])),
    }
    return result | ({"compare": summaries[1], "comparison": _compared(*summaries)} if compare else {})


def write(result: dict[str, Any], path: Path) -> None:
    """`path` as JSON, and beside it a CSV with a row per case and class (with `compare`, of both sets)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(result, indent=2, allow_nan=False) + "\n")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["predictions", "case", "class", *_COLUMNS])
    for part in (result, *([result["compare"]] if "compare" in result else [])):
        for row in part["cases"]:
            for name in part["per_class"]:
                writer.writerow(
                    [part["predictions"], row["case"], name, *(row[column][name] for column in _COLUMNS)]
                )
    write_text(path.with_suffix(".csv"), text.getvalue())


def report(result: dict[str, Any], images: Path | None = None) -> str:
    """The HTML report of what `evaluate` returned; reads the worst cases' files again.

    Args: images: their folder; None: the images that the predictions were made from, or `imagesTr` beside
        `labelsTr`.
    """
    references = Path(result["references"])
    folders = [Path(part["predictions"]) for part in (result, result.get("compare")) if part]
    files = [in_folder(folder, "") for folder in (references, *folders)]
    paths = {row["case"]: tuple(f[row["case"]] for f in files if row["case"] in f) for row in result["cases"]}
    return write_report(result, paths, images_of(folders[0], references, images, list(paths)))


def table(result: dict[str, Any]) -> str:
    """Per class: mean and standard deviation of Dice, the means of the other metrics, and the number of cases
    where Dice is defined.
    """
    width = max([20, *(len(name) for name in result["per_class"])])
    lines = [
        f"{'class':<{width}} {'Dice':>7} {'sd':>7} {'NSD':>7} {'HD95 mm':>8} {'ASD mm':>7} {'volume %':>8} "
        f"{'cases':>6}"
    ]
    for name, values in result["statistics"].items():
        lines.append(
            f"{name:<{width}} {_cells(result['per_class'][name], values['dice']['sd'])} "
            f"{values['dice']['n']:>6}"
        )
    lines.append(f"{'mean foreground':<{width}} {_cells(result['mean'], None)}".rstrip())
    if missing := result["without_prediction"]:
        names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        total = len(missing) + len(result["cases"])
        lines.append(f"{len(missing)} of {total} references have no prediction and are not counted: {names}")
    for name, values in result.get("comparison", {}).items():
        dice = values["dice"]
        difference, p = (_number(dice[key], 4, 0) for key in ("difference", "p_holm"))
        lines.append(
            f"{name}: Dice minus that of --compare {difference} in {dice['n']} cases, p {p} (Wilcoxon, Holm)"
        )
    return "\n".join(lines)


def _measured(
    paths: Mapping[str, Path],
    references: Mapping[str, Path],
    targets: SegmentationTargets | None,
    tolerance: labels.Tolerance,
    workers: int,
) -> list[dict[str, Any]]:
    """A row per case. Raises: ValueError: all cases that cannot be measured."""

    def work(case: str) -> dict[str, Any] | str:
        try:
            return {"case": case, **_measure_case(paths[case], references[case], targets, tolerance)}
        except ValueError as error:
            return f"  case {case}: {error}"

    results = list(each(work, list(paths), workers, "evaluating"))
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        raise ValueError(f"{len(errors)} of {len(paths)} cases cannot be evaluated\n" + "\n".join(errors))
    return [result for result in results if not isinstance(result, str)]


def _measure_case(
    prediction: Path, reference: Path, targets: SegmentationTargets | None, tolerance: labels.Tolerance
) -> dict[str, ClassScores]:
    (predicted, grid), (label, label_grid) = read_label(prediction), read_label(reference)
    check_same_grid(reference, label_grid, prediction, grid)
    if targets is None:
        targets = labels.numbered(set(np.union1d(predicted, label).tolist()))
    labels.check_declared(prediction, predicted, targets)
    labels.check_declared(reference, label, targets, targets.ignore)
    return measure(predicted, label, label_grid, targets, tolerance.for_classes(targets.names))


def _summary(predictions: Path, rows: list[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """The results of one set of predictions; a class that a case's row does not have is undefined there."""
    cases = [
        {"case": row["case"], **{c: {n: row[c].get(n) for n in names} for c in _COLUMNS}} for row in rows
    ]
    described = {n: {c: statistics.describe([row[c][n] for row in cases]) for c in _COLUMNS} for n in names}
    per_class = {n: {c: values["mean"] for c, values in columns.items()} for n, columns in described.items()}
    mean = {c: metrics_dice.mean({n: per_class[n][c] for n in names}) for c in _COLUMNS}
    return {
        "predictions": str(predictions),
        "mean": mean,
        "per_class": per_class,
        "statistics": described,
        "cases": cases,
    }


def _compared(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Class to metric to what `statistics.paired` returns, over the cases of both, with `p_holm`:
    corrected over the classes.
    """
    rows = [{row["case"]: row for row in part["cases"]} for part in (first, second)]
    shared = [case for case in rows[0] if case in rows[1]]
    if not shared:
        raise ValueError(f"--compare {second['predictions']}: no case that {first['predictions']} has too")
    result: dict[str, Any] = {name: {} for name in first["per_class"]}
    for metric in METRICS:
        for name, by_metric in result.items():
            values = [[metric.error(part[case][metric.name][name]) for case in shared] for part in rows]
            by_metric[metric.name] = statistics.paired(*values)
        corrected = statistics.holm({name: tests[metric.name]["p"] for name, tests in result.items()})
        for name, by_metric in result.items():
            by_metric[metric.name]["p_holm"] = corrected[name]
    return result


def _cells(values: Mapping[str, float | None], sd: float | None) -> str:
    volume = values["volume_error"]
    cells = [(values["dice"], 4, 7), (sd, 4, 7), (values["nsd"], 4, 7), (values["hd95_mm"], 2, 8)]
    cells += [(values["asd_mm"], 2, 7), (None if volume is None else 100 * volume, 1, 8)]
    return " ".join(_number(*cell) for cell in cells)


def _number(value: float | None, digits: int, width: int) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"


def _check_writable(path: Path) -> None:
    """Fail before the work, not after it. Raises: ValueError: the path, or one beside it, cannot be
    written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in (path, path.with_suffix(".csv"), path.with_suffix(".html")):
            if file.is_dir():
                raise ValueError(f"--output {file}: cannot be written ({os.strerror(errno.EISDIR)})")
        probe = path.with_name(f".{os.getpid()}.{path.name}")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--output {path}: cannot be written ({error.strerror})") from error
