"""Predicted against reference label maps: the metrics of every case, and their statistics per class."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from medconv.data.datasets.patterns import home
from medconv.data.io.grids import on_grid
from medconv.data.io.images import read_label
from medconv.data.io.raster import check_ignored
from medconv.evaluation import labels, predicted_quality, segmentation_summary
from medconv.evaluation.overlays import images_of
from medconv.evaluation.rendering import plain_number
from medconv.evaluation.segmentation_report import write_report
from medconv.evaluation.segmentation_summary import CaseRow, columns_of
from medconv.evaluation.stated_spacing import agreed_spacing, stated_grid
from medconv.metrics.dice import ClassScores
from medconv.metrics.segmentation import measure
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.threads import each


@dataclass(frozen=True)
class LabelMapEvaluation:
    """The result of `evaluate`.

    Args:
        result: the content of the JSON file.
        files: case to its reference, its prediction and, with `compare`, its other prediction.
        images: case to image, for cases that have one.
    """

    counted: ClassVar[str] = "references"
    result: dict[str, Any]
    files: Mapping[str, tuple[Path, ...]]
    images: Mapping[str, Path]

    def csv_rows(self) -> Iterator[Sequence[Any]]:
        """The header, then a row per case and class (with `compare`, of both sets)."""
        columns = columns_of(self.result["lesion_iou"])
        yield ["predictions", "case", "class", *columns]
        summaries = [self.result]
        if "compare" in self.result:
            summaries.append(self.result["compare"])
        for summary in summaries:
            for row in summary["cases"]:
                for name in summary["per_class"]:
                    values = [row[column][name] for column in columns]
                    yield [summary["predictions"], row["case"], name, *values]

    def score_lines(self) -> list[str]:
        """Per class: mean and standard deviation of Dice, the means of the other metrics, and the number of
        cases where Dice is defined.
        """
        per_class = self.result["per_class"]
        width = max([20, *map(len, per_class)])
        lines = [f"{'class':<{width}} {self._titles()} {'cases':>6}"]
        for name, values in self.result["statistics"].items():
            cells = _cells(per_class[name], values["dice"]["sd"])
            lines.append(f"{name:<{width}} {cells} {values['dice']['n']:>6}")
        lines.append(f"{'mean foreground':<{width}} {_cells(self.result['mean'], None)}")
        return lines + self._quality_lines()

    def _titles(self) -> str:
        titles = f"{'Dice':>7} {'sd':>7} {'NSD':>7} {'HD95 mm':>8} {'ASD mm':>7} {'volume %':>8}"
        if self.result["lesion_iou"] is not None:
            titles += f" {'lesion F1':>9} {'PQ':>7}"
        return titles

    def _quality_lines(self) -> list[str]:
        if "quality" not in self.result:
            return []
        lines = []
        for name, row in self.result["quality"]["per_class"].items():
            difference = plain_number(row["difference"])
            correlation = plain_number(row["spearman"])
            lines.append(
                f"{name}: predicted minus true Dice {difference}, Spearman {correlation} in {row['n']} cases; "
                f"{_calibration_text(row['mae_calibrated'])}"
            )
        return lines

    def comparison_lines(self) -> list[str]:
        lines = []
        for name, tests in self.result["comparison"].items():
            dice = tests["dice"]
            lines.append(
                f"{name}: Dice, predictions minus compare: {plain_number(dice['difference'])} in {dice['n']} "
                f"cases, p {plain_number(dice['p_holm'])} (Wilcoxon, Holm)"
            )
        return lines

    def page(self) -> str:
        return write_report(self.result, self.files, self.images)


@dataclass(frozen=True)
class _PredictionSet:
    """Label maps of one network.

    Args:
        path: folder, or pattern with `{id}`.
        files: case to label map.
    """

    path: Path
    files: Mapping[str, Path]

    @property
    def folder(self) -> Path:
        return home(self.path)


@dataclass(frozen=True)
class _Measurement:
    """What is measured in a case.

    Args:
        targets: None: the label values of each case are its classes.
        tolerances: of the surface Dice in mm, by class; None stands for all other classes.
        lesion_iou: overlap from which lesions match; None: they are not measured.
    """

    targets: SegmentationTargets | None
    tolerances: Mapping[str | None, float]
    lesion_iou: float | None


def evaluate(
    predictions: Path,
    references: Path,
    compare: Path | None = None,
    tolerance_mm: Mapping[str | None, float] | None = None,
    workers: int = 1,
    images: Path | None = None,
    lesion_iou: float | None = None,
    annotated: Sequence[str] = (),
) -> LabelMapEvaluation:
    """Measure every prediction against the reference of the same case id; with `compare`, those of a second
    folder too. Each is a folder, or a pattern with `{id}`, see `patterns.files_of`.

    Args:
        predictions: label maps to measure.
        references: label maps to measure against.
        compare: other predictions.
        tolerance_mm: of the surface Dice, by class; None stands for all other classes.
        workers: cases measured at once.
        images: their folder; None: the images that the predictions were made from, or `imagesTr` beside
            `labelsTr`.
        lesion_iou: overlap from which lesions match; None: they are not measured.
        annotated: such as `siteA_*=liver`: other classes are undefined in these cases.
    Returns:
        With the result: `mean` (metric to value), `per_class` (class to metric to mean), `statistics` (class
        to metric to what `statistics.describe` returns), `cases` (one row each: metric to class to value),
        `train_cases` (those that the network was trained on), `without_prediction` (references without a
        prediction), `tolerance_mm`, `lesion_iou`; with `compare` also `compare` (the same for the other
        predictions) and `comparison`; with predicted quality beside the predictions, `quality`.
    Raises:
        ValueError: a folder without label maps, predictions without a reference, or label maps that cannot
            be measured; names all.
    """
    prediction_sets = _prediction_sets(predictions, compare)
    reference_files = _reference_files(references, prediction_sets)
    targets = labels.agreed_targets(
        [each_set.folder for each_set in prediction_sets],
        home(references),
    )
    reference_files = labels.with_annotated_structures(
        reference_files,
        annotated,
        targets,
    )
    tolerances = tolerance_mm or {}
    if targets:  # fail before the work
        labels.check_tolerances(tolerances, targets.names)
        _check_ignored_values(targets, reference_files)
    first = prediction_sets[0]
    image_files = images_of(first.folder, home(references), images, list(first.files))
    measurement = _Measurement(targets, tolerances, lesion_iou)
    rows_of_sets = _measure_sets(prediction_sets, reference_files, measurement, workers)
    targets = targets or _numbered_targets(rows_of_sets)
    labels.check_tolerances(tolerances, targets.names)
    annotated_names = labels.annotated(annotated, reference_files, targets.names)
    for rows in rows_of_sets:
        _drop_not_annotated(rows, annotated_names, targets.names, lesion_iou)
    summaries = [
        segmentation_summary.summarize(each_set.path, rows, targets.names, lesion_iou)
        for each_set, rows in zip(prediction_sets, rows_of_sets, strict=True)
    ]
    result = {
        **summaries[0],
        "references": str(references),
        "targets": targets.plain(),
        "tolerance_mm": labels.tolerance_of(tolerances, targets.names),
        "lesion_iou": lesion_iou,
        "without_prediction": sorted(set(reference_files) - set(first.files)),
    }
    result |= _quality(first, summaries[0]["cases"], targets.names)
    result |= _comparison(summaries, lesion_iou)
    files = _files_of_cases(prediction_sets, reference_files)
    return LabelMapEvaluation(result, files, image_files)


def _prediction_sets(
    predictions: Path,
    compare: Path | None,
) -> list[_PredictionSet]:
    sets = [_PredictionSet(predictions, labels.case_files(predictions, "predictions"))]
    if compare:
        sets.append(_PredictionSet(compare, labels.case_files(compare, "compare")))
    return sets


def _reference_files(
    references: Path,
    prediction_sets: Sequence[_PredictionSet],
) -> dict[str, Path]:
    """Case to its reference. Raises: ValueError: predictions without a reference."""
    files = labels.case_files(references, "references")
    predicted_cases = {case for each_set in prediction_sets for case in each_set.files}
    missing = sorted(predicted_cases - set(files))
    if missing:
        raise ValueError(f"references {references}: no label map there for {', '.join(missing[:20])}")
    return files


def _check_ignored_values(
    targets: SegmentationTargets,
    reference_files: Mapping[str, Path],
) -> None:
    for value in (targets.ignore, *targets.also_ignored):
        check_ignored(value, reference_files.values())


def _measure_sets(
    prediction_sets: Sequence[_PredictionSet],
    reference_files: Mapping[str, Path],
    measurement: _Measurement,
    workers: int,
) -> list[list[CaseRow]]:
    """A row per case, for each set of predictions."""
    folders = [each_set.folder for each_set in prediction_sets]
    cases = {case for each_set in prediction_sets for case in each_set.files}
    spacings = agreed_spacing(folders, cases)
    return [
        _measure_cases(each_set.files, reference_files, measurement, stated_spacing, workers)
        for each_set, stated_spacing in zip(prediction_sets, spacings, strict=True)
    ]


def _measure_cases(
    prediction_files: Mapping[str, Path],
    reference_files: Mapping[str, Path],
    measurement: _Measurement,
    stated_spacing: Any,
    workers: int,
) -> list[CaseRow]:
    """A row per case. Raises: ValueError: all cases that cannot be measured."""

    def row_or_error(case: str) -> CaseRow | str:
        try:
            scores = _measure_case(
                case,
                prediction_files[case],
                reference_files[case],
                measurement,
                stated_spacing,
            )
        except ValueError as error:
            return f"  case {case}: {error}"
        return {"case": case, **scores}

    results = list(each(row_or_error, list(prediction_files), workers, "evaluating"))
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        count = f"{len(errors)} of {len(prediction_files)} cases"
        raise ValueError(f"{count} cannot be evaluated\n" + "\n".join(errors))
    return [result for result in results if not isinstance(result, str)]


def _measure_case(
    case: str,
    prediction_file: Path,
    reference_file: Path,
    measurement: _Measurement,
    stated_spacing: Any,
) -> dict[str, ClassScores]:
    """Metric to class to value."""
    prediction, prediction_grid = read_label(prediction_file)
    reference, grid = read_label(reference_file, prediction_file)
    prediction = on_grid(
        prediction,
        reference_file,
        grid,
        prediction_file,
        prediction_grid,
    )
    targets = measurement.targets
    if targets is None:
        targets = labels.numbered(set(np.union1d(prediction, reference).tolist()))
    grid = stated_grid(grid, stated_spacing, case)
    reference = targets.one_ignored(reference)
    labels.check_declared(prediction_file, prediction, targets)
    # only a reference may hold the value to ignore
    labels.check_declared(reference_file, reference, targets, targets.ignore)
    return measure(
        prediction,
        reference,
        grid,
        targets,
        tolerance_mm=labels.tolerance_of(measurement.tolerances, targets.names),
        lesion_iou=measurement.lesion_iou,
    )


def _numbered_targets(rows_of_sets: Sequence[Sequence[CaseRow]]) -> SegmentationTargets:
    """A class for each label value of any case."""
    return labels.numbered({name for rows in rows_of_sets for row in rows for name in row["dice"]})


def _drop_not_annotated(
    rows: Sequence[CaseRow],
    annotated_names: Mapping[str, Sequence[str]],
    names: Sequence[str],
    lesion_iou: float | None,
) -> None:
    """Make the values of classes that a case's reference does not have undefined."""
    for row in rows:
        annotated = annotated_names.get(row["case"])
        if annotated is None:
            continue
        for column in columns_of(lesion_iou):
            scores = row[column]
            row[column] = {name: scores.get(name) if name in annotated else None for name in names}


def _quality(
    prediction_set: _PredictionSet,
    cases: Sequence[CaseRow],
    names: Sequence[str],
) -> dict[str, Any]:
    """The key `quality`, where the network predicted its own Dice."""
    predicted_dice = predicted_quality.read(
        prediction_set.folder,
        names,
        list(prediction_set.files),
    )
    if not predicted_dice:
        return {}
    true_dice = {row["case"]: row["dice"] for row in cases}
    per_class = predicted_quality.compared(predicted_dice, true_dice, names)
    return {"quality": {"per_class": per_class, "cases": predicted_dice}}


def _comparison(
    summaries: Sequence[dict[str, Any]],
    lesion_iou: float | None,
) -> dict[str, Any]:
    """The keys `compare` and `comparison`, where there are two sets of predictions."""
    if len(summaries) < 2:
        return {}
    first, second = summaries
    return {"compare": second, "comparison": segmentation_summary.compare(first, second, lesion_iou)}


def _files_of_cases(
    prediction_sets: Sequence[_PredictionSet],
    reference_files: Mapping[str, Path],
) -> dict[str, tuple[Path, ...]]:
    """Case to its reference and its predictions."""
    files = {}
    for case in prediction_sets[0].files:
        predicted = [each_set.files[case] for each_set in prediction_sets if case in each_set.files]
        files[case] = (reference_files[case], *predicted)
    return files


def _calibration_text(error: float | None) -> str:
    if error is None:
        return "not calibrated: too few cases, or all predictions alike"
    return f"calibrated, off by {error:.4f}"


def _cells(values: Mapping[str, float | None], sd: float | None) -> str:
    """Cells of a line. Args: values: metric to value."""
    volume_error = values["volume_error"]
    volume_per_cent = None if volume_error is None else 100 * volume_error
    cells = [  # value, digits, width
        (values["dice"], 4, 7),
        (sd, 4, 7),
        (values["nsd"], 4, 7),
        (values["hd95_mm"], 2, 8),
        (values["asd_mm"], 2, 7),
        (volume_per_cent, 1, 8),
    ]
    if "lesion_f1" in values:
        cells.append((values["lesion_f1"], 4, 9))
        cells.append((values["panoptic_quality"], 4, 7))
    return " ".join(f"{plain_number(value, digits):>{width}}" for value, digits, width in cells)
