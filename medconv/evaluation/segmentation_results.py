"""What the measured cases of a segmentation come to: statistics per class, the rows of the CSV, the table."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from medconv import doors
from medconv.data.datasets.patterns import home
from medconv.data.io.raster import is_picture
from medconv.evaluation import labels
from medconv.evaluation.results import plain_number
from medconv.metrics import dice as metrics_dice
from medconv.metrics import statistics
from medconv.metrics.segmentation import VOLUMES, Metric, MetricSelection
from medconv.targets.scores import spread_text

CaseRow = dict[str, Any]  # `case`, and metric to class to value


def columns_of(selection: MetricSelection) -> list[str]:
    """Metrics and volumes, as a case's row has them."""
    metric_names = [metric.name for metric in selection.metrics]
    return [*metric_names, *VOLUMES]


def selection_of(result: Mapping[str, Any]) -> MetricSelection:
    """The metrics that the content of a JSON file has."""
    return MetricSelection(result["lesion_iou"], result["centreline"])


def summarize(
    predictions: Path, rows: Sequence[CaseRow], names: Sequence[str], selection: MetricSelection
) -> dict[str, Any]:
    """The results of one set of predictions; a class that a case's row does not have is undefined there."""
    return {
        "predictions": str(predictions),
        **described(rows, names, selection),
        "train_cases": labels.train_cases(home(predictions), [row["case"] for row in rows]),
    }


def described(rows: Sequence[CaseRow], names: Sequence[str], selection: MetricSelection) -> dict[str, Any]:
    """`mean`, `per_class`, `statistics` and `cases` of the rows of cases, see `LabelMapEvaluation`.

    Args:
        rows: one per case; a class that a row does not have is undefined there.
        names: of the classes.
        selection: which metrics the rows have beside the usual ones.
    """
    columns = columns_of(selection)
    cases = [_with_all_classes(row, names, columns) for row in rows]
    statistics_by_class = {name: _statistics(cases, name, columns) for name in names}
    per_class = {
        name: {column: values["mean"] for column, values in by_column.items()}
        for name, by_column in statistics_by_class.items()
    }
    # over cases first, then over classes: a rare class counts as much as a frequent one
    mean = {column: metrics_dice.mean(per_class[name][column] for name in names) for column in columns}
    return {"mean": mean, "per_class": per_class, "statistics": statistics_by_class, "cases": cases}


def compare(
    first: Mapping[str, Any], second: Mapping[str, Any], selection: MetricSelection
) -> dict[str, Any]:
    """Class to metric to what `statistics.paired` returns, over the cases of both, with `p_holm`:
    corrected over the classes.

    Args:
        first: what `summarize` returned.
        second: the same of the other predictions.
    Raises:
        ValueError: no case that both have.
    """
    # paired by case id, as each set may lack cases of the other
    second_rows = {row["case"]: row for row in second["cases"]}
    pairs = []
    for row in first["cases"]:
        if row["case"] in second_rows:
            pairs.append((row, second_rows[row["case"]]))
    if not pairs:
        raise ValueError(f"compare {second['predictions']}: no case in common with {first['predictions']}")
    comparison: dict[str, Any] = {name: {} for name in first["per_class"]}
    for metric in selection.metrics:
        tests = {name: _paired_test(pairs, metric, name) for name in comparison}
        # one family of tests per metric
        p_values = {name: test["p"] for name, test in tests.items()}
        corrected = statistics.holm(p_values)
        for name, test in tests.items():
            comparison[name][metric.name] = {**test, "p_holm": corrected[name]}
    return comparison


def _with_all_classes(row: CaseRow, names: Sequence[str], columns: Sequence[str]) -> CaseRow:
    """A row whose metrics have all classes; None where a class is undefined."""
    complete: CaseRow = {"case": row["case"]}
    for column in columns:
        complete[column] = {name: row[column].get(name) for name in names}
    return complete


def _statistics(cases: Sequence[CaseRow], name: str, columns: Sequence[str]) -> dict[str, Any]:
    """Metric to the statistics of a class."""
    by_column = {}
    for column in columns:
        values = [row[column][name] for row in cases]
        by_column[column] = statistics.describe(values)
    return by_column


def _paired_test(pairs: Sequence[tuple[CaseRow, CaseRow]], metric: Metric, name: str) -> dict[str, Any]:
    first_values = [metric.error(first[metric.name][name]) for first, _ in pairs]
    second_values = [metric.error(second[metric.name][name]) for _, second in pairs]
    return statistics.paired(first_values, second_values)


@dataclass(frozen=True)
class LabelMapEvaluation:
    """The result of `segmentation.evaluate`.

    Args:
        result: the content of the JSON file: `mean` (metric to value), `per_class` (class to metric to mean),
            `statistics` (class to metric to what `statistics.describe` returns), `cases` (one row each:
            metric to class to value), `train_cases` (those that the network was trained on),
            `without_prediction` (references without a prediction), `tolerance_mm`, `lesion_iou`,
            `centreline`; with `compare` also `compare` (the same for the other predictions) and `comparison`;
            with several raters, what `summarize_raters` returns; what features measure, by their keys.
        files: case to its reference, its prediction and, with `compare`, its other prediction.
        images: case to image, for cases that have one.
        states_spacing: whether the predictions' manifest states the images' spacing.
    """

    counted: ClassVar[str] = "references"
    result: dict[str, Any]
    files: Mapping[str, tuple[Path, ...]]
    images: Mapping[str, Path]
    states_spacing: bool = False

    @property
    def length_unit(self) -> str:
        """Pictures have no spacing, unless one was stated: 1 mm stands for a pixel."""
        are_pictures = all(is_picture(path) for files in self.files.values() for path in files)
        return "px" if are_pictures and not self.states_spacing else "mm"

    def csv_rows(self) -> Iterator[Sequence[Any]]:
        """The header, then a row per case and class (with `compare`, of both sets)."""
        columns = columns_of(selection_of(self.result))
        yield ["predictions", "case", "class", *columns]
        # `compare` has the same keys as the whole result
        summaries = [self.result]
        if "compare" in self.result:
            summaries.append(self.result["compare"])
        for summary in summaries:
            for values in class_rows(summary["cases"], summary["per_class"], columns):
                yield [summary["predictions"], *values]

    def score_lines(self) -> list[str]:
        """Per class: mean and standard deviation of Dice, the means of the other metrics, and the number of
        cases where Dice is defined; then the cases of the lowest Dice.
        """
        per_class = self.result["per_class"]
        width = max([20, *map(len, per_class)])  # letters of the first column
        lines = [f"{'class':<{width}} {self._titles()} {'cases':>6}"]
        for name, values in self.result["statistics"].items():
            cells = _cells(per_class[name], values["dice"]["sd"])
            lines.append(f"{name:<{width}} {cells} {values['dice']['n']:>6}")
        lines.append(f"{'mean foreground':<{width}} {_cells(self.result['mean'], None)}")
        spread = spread_text(
            {row["case"]: metrics_dice.mean(row["dice"].values()) for row in self.result["cases"]}
        )
        if spread:
            lines.append(f"Dice {spread}")
        volumes = [(name, row["volume_ml"], row["reference_volume_ml"]) for name, row in per_class.items()]
        only_predicted = [name for name, predicted, true in volumes if predicted and not true]
        if only_predicted:
            lines.append(f"no reference has {', '.join(only_predicted)}, which predictions have")
        lines += self._rater_lines()
        for feature in doors.objects(doors.EVALUATIONS):
            if feature.KEY in self.result:
                lines += feature.lines(self.result[feature.KEY])
        return lines

    def _titles(self) -> str:
        distances = f"{'HD95 ' + self.length_unit:>8} {'ASD ' + self.length_unit:>7}"
        titles = f"{'Dice':>7} {'sd':>7} {'NSD':>7} {distances} {'volume %':>8}"
        if self.result["lesion_iou"] is not None:
            titles += f" {'lesion F1':>9} {'PQ':>7}"
        if self.result["centreline"]:
            titles += f" {'clDice':>7}"
        # Those of features and packages, in the width that `_cells` gives them.
        for metric in doors.objects(doors.METRICS):
            titles += f" {metric.label:>{_own_width(metric)}}"
        return titles

    def _rater_lines(self) -> list[str]:
        """Mean Dice against each rater, to be compared with that among them."""
        if "raters" not in self.result:
            return []
        lines = [f"reference: the raters' consensus by {self.result['consensus']}; Dice against each:"]
        for rater, scores in self.result["raters"].items():
            lines.append(f"  {rater}: {plain_number(scores['dice'])} in {scores['n']} cases")
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


def class_rows(
    cases: Sequence[CaseRow], names: Iterable[str], columns: Sequence[str]
) -> Iterator[Sequence[Any]]:
    """A row per case and class: the case, the class, and the value of each column."""
    for row in cases:
        for name in names:
            yield [row["case"], name, *(row[column][name] for column in columns)]


def _cells(values: Mapping[str, float | None], sd: float | None) -> str:
    """Cells of a line. Args: values: metric to value."""
    # a share in the JSON, per cent in the table
    volume_error = values["volume_error"]
    volume_per_cent = None if volume_error is None else 100 * volume_error
    cells = [  # value, digits, width
        (values["dice"], 4, 7),
        (sd, 4, 7),
        (values["nsd"], 4, 7),
        (values["hd95_mm"], _mm_digits(values["hd95_mm"]), 8),
        (values["asd_mm"], _mm_digits(values["asd_mm"]), 7),
        (volume_per_cent, 1, 8),
    ]
    if "lesion_f1" in values:
        cells.append((values["lesion_f1"], 4, 9))
        cells.append((values["panoptic_quality"], 4, 7))
    if "cldice" in values:
        cells.append((values["cldice"], 4, 7))
    for metric in doors.objects(doors.METRICS):
        cells.append((values[metric.name], 4, _own_width(metric)))
    return " ".join(f"{plain_number(value, digits):>{width}}" for value, digits, width in cells)


def _mm_digits(mm: float | None) -> int:
    """Digits behind the point: two, and for less than 0.1 mm, as in microscopy, two that are not 0."""
    return 1 - math.floor(math.log10(mm)) if mm and mm < 0.1 else 2


def _own_width(metric: Metric) -> int:
    """Letters of a column of a feature's metric."""
    return max(7, len(metric.label))
