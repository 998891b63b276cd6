"""Predicted against reference label maps: the metrics of every case, and their statistics per class."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from medconv.data.datasets.patterns import files_of, home
from medconv.data.io.grids import on_grid
from medconv.data.io.images import read_label
from medconv.data.io.raster import check_ignored
from medconv.evaluation import labels, predicted_quality
from medconv.evaluation.overlays import images_of
from medconv.evaluation.rendering import plain_number
from medconv.evaluation.segmentation_report import write_report
from medconv.metrics import dice as metrics_dice
from medconv.metrics import statistics
from medconv.metrics.dice import ClassScores
from medconv.metrics.segmentation import VOLUMES, measure, metrics_of
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.threads import each


@dataclass(frozen=True)
class LabelMapEvaluation:
    """What `evaluate` found.

    Args: result: the content of the JSON file. files: case to its reference, its prediction and that of
        `--compare`. images: case to image, where known.
    """

    counted: ClassVar[str] = "references"
    result: dict[str, Any]
    files: Mapping[str, tuple[Path, ...]]
    images: Mapping[str, Path]

    def csv_rows(self) -> Iterator[Sequence[Any]]:
        """The header, then a row per case and class (with `compare`, of both sets)."""
        columns = _columns(self.result["lesion_iou"])
        yield ["predictions", "case", "class", *columns]
        for part in (self.result, *([self.result["compare"]] if "compare" in self.result else [])):
            for row in part["cases"]:
                for name in part["per_class"]:
                    yield [part["predictions"], row["case"], name, *(row[c][name] for c in columns)]

    def score_lines(self) -> list[str]:
        """Per class: mean and standard deviation of Dice, the means of the other metrics, and the number of
        cases where Dice is defined.
        """
        per_class = self.result["per_class"]
        width = max([20, *map(len, per_class)])
        titles = f"{'Dice':>7} {'sd':>7} {'NSD':>7} {'HD95 mm':>8} {'ASD mm':>7} {'volume %':>8}"
        titles += f" {'lesion F1':>9} {'PQ':>7}" if self.result["lesion_iou"] is not None else ""
        rows = [
            f"{name:<{width}} {_cells(per_class[name], values['dice']['sd'])} {values['dice']['n']:>6}"
            for name, values in self.result["statistics"].items()
        ]
        mean = f"{'mean foreground':<{width}} {_cells(self.result['mean'], None)}"
        return [f"{'class':<{width}} {titles} {'cases':>6}", *rows, mean, *self._quality_lines()]

    def _quality_lines(self) -> list[str]:
        rows = self.result.get("quality", {}).get("per_class", {}).items()
        return [
            f"{name}: predicted minus true Dice {plain_number(row['difference'])}, Spearman "
            f"{plain_number(row['spearman'])} in {row['n']} cases; {_calibrated(row['mae_calibrated'])}"
            for name, row in rows
        ]

    def comparison_lines(self) -> list[str]:
        rows = [(name, values["dice"]) for name, values in self.result["comparison"].items()]
        return [
            f"{name}: Dice minus that of --compare {plain_number(dice['difference'])} in {dice['n']} cases, "
            f"p {plain_number(dice['p_holm'])} (Wilcoxon, Holm)"
            for name, dice in rows
        ]

    def page(self) -> str:
        return write_report(self.result, self.files, self.images)


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

    Args: tolerance_mm: of the surface Dice, by class; None stands for all other classes. workers: cases
        measured at once. images: their folder; None: the images that the predictions were made from, or
        `imagesTr` beside `labelsTr`. lesion_iou: overlap from which lesions match; None: they are not
        measured. annotated: such as `siteA_*=liver`: other classes are undefined in these cases.
    Returns: with the result: `mean` (metric to value), `per_class` (class to metric to mean), `statistics`
        (class to metric to what `statistics.describe` returns), `cases` (one row each: metric to class to
        value), `train_cases` (those that the network was trained on), `without_prediction` (references
        without a prediction), `tolerance_mm`, `lesion_iou`; with `compare` also `compare` (the same for the
        other predictions) and `comparison`; with predicted quality beside the predictions, `quality`.
    Raises: ValueError: a folder without label maps, predictions without a reference, or label maps that
        cannot be measured; names all.
    """
    sets = [(predictions, "--predictions")] + ([(compare, "--compare")] if compare else [])
    predicted = [files_of(*each_set) for each_set in sets]
    folders, labels_home = [home(folder) for folder, _ in sets], home(references)
    reference_paths = files_of(references, "--references")
    missing = sorted({case for paths in predicted for case in paths} - set(reference_paths))
    if missing:
        raise ValueError(f"--references {references}: no label map there for {', '.join(missing[:20])}")
    targets = labels.agreed_targets(folders, labels_home)
    reference_paths = labels.with_annotated_structures(reference_paths, annotated, targets)
    tolerances = tolerance_mm or {}
    if targets:
        labels.check_tolerances(tolerances, targets.names)  # fail before the work
        for value in (targets.ignore, *targets.also_ignored):
            check_ignored(value, reference_paths.values())
    columns = _columns(lesion_iou)
    shown = images_of(folders[0], labels_home, images, list(predicted[0]))
    options = (targets, tolerances, lesion_iou, workers)
    stated = labels.agreed_spacing(folders, {case for paths in predicted for case in paths})
    rows = [
        _measured(paths, reference_paths, *options, spacing_mm)
        for paths, spacing_mm in zip(predicted, stated, strict=True)
    ]
    targets = targets or labels.numbered({name for cases in rows for row in cases for name in row["dice"]})
    labels.check_tolerances(tolerances, targets.names)
    for case, known in labels.annotated(annotated, reference_paths, targets.names).items():
        for row in (row for part in rows for row in part if row["case"] == case):
            row |= {c: {n: row[c].get(n) if n in known else None for n in targets.names} for c in columns}
    settings = (targets.names, lesion_iou)
    summaries = [_summary(path, cases, *settings) for (path, _), cases in zip(sets, rows, strict=True)]
    result = {
        **summaries[0],
        "references": str(references),
        "targets": targets.plain(),
        "tolerance_mm": labels.tolerance_of(tolerances, targets.names),
        "lesion_iou": lesion_iou,
        "without_prediction": sorted(set(reference_paths) - set(predicted[0])),
    }
    if predicted_dice := predicted_quality.read(folders[0], targets.names, list(predicted[0])):
        true_dice = {row["case"]: row["dice"] for row in summaries[0]["cases"]}
        against = predicted_quality.compared(predicted_dice, true_dice, targets.names)
        result["quality"] = {"per_class": against, "cases": predicted_dice}
    if compare:
        result |= {"compare": summaries[1], "comparison": _compared(summaries[0], summaries[1], lesion_iou)}
    sets_of_files = (reference_paths, *predicted)
    files = {case: tuple(paths[case] for paths in sets_of_files if case in paths) for case in predicted[0]}
    return LabelMapEvaluation(result, files, shown)


def _measured(
    paths: Mapping[str, Path],
    references: Mapping[str, Path],
    targets: SegmentationTargets | None,
    tolerances: Mapping[str | None, float],
    lesion_iou: float | None,
    workers: int,
    stated_spacing: Any,
) -> list[dict[str, Any]]:
    """A row per case. Raises: ValueError: all cases that cannot be measured."""

    def work(case: str) -> dict[str, Any] | str:
        try:
            files = (paths[case], references[case])
            return {
                "case": case,
                **_measure_case(case, *files, targets, tolerances, lesion_iou, stated_spacing),
            }
        except ValueError as error:
            return f"  case {case}: {error}"

    results = list(each(work, list(paths), workers, "evaluating"))
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        raise ValueError(f"{len(errors)} of {len(paths)} cases cannot be evaluated\n" + "\n".join(errors))
    return [result for result in results if not isinstance(result, str)]


def _measure_case(
    case: str,
    prediction: Path,
    reference: Path,
    targets: SegmentationTargets | None,
    tolerances: Mapping[str | None, float],
    lesion_iou: float | None,
    stated_spacing: Any,
) -> dict[str, ClassScores]:
    (predicted, grid), (label, label_grid) = read_label(prediction), read_label(reference, prediction)
    predicted = on_grid(predicted, reference, label_grid, prediction, grid)
    if targets is None:
        targets = labels.numbered(set(np.union1d(predicted, label).tolist()))
    label_grid, label = labels.stated_grid(label_grid, stated_spacing, case), targets.one_ignored(label)
    labels.check_declared(prediction, predicted, targets)
    labels.check_declared(reference, label, targets, targets.ignore)
    tolerance_mm = labels.tolerance_of(tolerances, targets.names)
    return measure(predicted, label, label_grid, targets, tolerance_mm, lesion_iou)


def _columns(lesion_iou: float | None) -> list[str]:
    return [*(metric.name for metric in metrics_of(lesion_iou)), *VOLUMES]


def _summary(
    predictions: Path, rows: list[dict[str, Any]], names: Sequence[str], lesion_iou: float | None
) -> dict[str, Any]:
    """The results of one set of predictions; a class that a case's row does not have is undefined there."""
    columns = _columns(lesion_iou)
    cases = [{"case": row["case"], **{c: {n: row[c].get(n) for n in names} for c in columns}} for row in rows]
    described = {n: {c: statistics.describe([row[c][n] for row in cases]) for c in columns} for n in names}
    per_class = {
        n: {c: values["mean"] for c, values in by_column.items()} for n, by_column in described.items()
    }
    mean = {c: metrics_dice.mean({n: per_class[n][c] for n in names}) for c in columns}
    return {
        "predictions": str(predictions),
        "mean": mean,
        "per_class": per_class,
        "statistics": described,
        "cases": cases,
        "train_cases": labels.train_cases(home(predictions), [row["case"] for row in rows]),
    }


def _compared(first: dict[str, Any], second: dict[str, Any], lesion_iou: float | None) -> dict[str, Any]:
    """Class to metric to what `statistics.paired` returns, over the cases of both, with `p_holm`:
    corrected over the classes.
    """
    rows = [{row["case"]: row for row in part["cases"]} for part in (first, second)]
    shared = [case for case in rows[0] if case in rows[1]]
    if not shared:
        raise ValueError(f"--compare {second['predictions']}: no case that {first['predictions']} has too")
    result: dict[str, Any] = {name: {} for name in first["per_class"]}
    for metric in metrics_of(lesion_iou):
        for name, by_metric in result.items():
            values = [[metric.error(part[case][metric.name][name]) for case in shared] for part in rows]
            by_metric[metric.name] = statistics.paired(*values)
        corrected = statistics.holm({name: tests[metric.name]["p"] for name, tests in result.items()})
        for name, by_metric in result.items():
            by_metric[metric.name]["p_holm"] = corrected[name]
    return result


def _calibrated(error: float | None) -> str:
    if error is None:
        return "not calibrated: too few, or all alike"
    return f"calibrated, off by {error:.4f}"


def _cells(values: Mapping[str, float | None], sd: float | None) -> str:
    volume = values["volume_error"]
    cells = [(values["dice"], 4, 7), (sd, 4, 7), (values["nsd"], 4, 7), (values["hd95_mm"], 2, 8)]
    cells += [(values["asd_mm"], 2, 7), (None if volume is None else 100 * volume, 1, 8)]
    if "lesion_f1" in values:
        cells += [(values["lesion_f1"], 4, 9), (values["panoptic_quality"], 4, 7)]
    return " ".join(f"{plain_number(value, digits):>{width}}" for value, digits, width in cells)
