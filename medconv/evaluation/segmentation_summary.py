"""Statistics of a segmentation evaluation: per class over the cases, and compared between two networks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv.data.datasets.patterns import home
from medconv.evaluation import labels
from medconv.metrics import dice as metrics_dice
from medconv.metrics import statistics
from medconv.metrics.segmentation import VOLUMES, Metric, MetricSelection

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
    mean = {}
    for column in columns:
        class_means = {name: per_class[name][column] for name in names}
        mean[column] = metrics_dice.mean(class_means)
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
        raise ValueError(f"compare {second['predictions']}: no case that {first['predictions']} has too")
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
