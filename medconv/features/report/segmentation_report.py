"""HTML report of a segmentation evaluation: tables, distributions, and pictures of the worst cases."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medconv import doors
from medconv.data.io.raster import colour
from medconv.evaluation.results import Evaluation
from medconv.evaluation.segmentation_results import LabelMapEvaluation, selection_of
from medconv.features.report import rendering
from medconv.features.report.distributions import Series, distribution
from medconv.features.report.overlays import case_picture
from medconv.metrics.dice import mean
from medconv.metrics.segmentation import Metric
from medconv.targets.segmentation import SegmentationTargets

_WORST_CASES = 6
_WORST_CLASSES = 8  # of each worst case
_MAX_LEGEND = 40  # label values
_LEVEL = 0.05  # significance level
_DEFINITIONS = {
    "Missing class": "in neither label map: no value, the case is not counted (n). In only one of the two: "
    "Dice and surface Dice are 0, distances are the length of the image from corner to corner.",
    "sd, interval": "standard deviation over cases (n - 1); 95 % bootstrap interval of the mean.",
}


def page(evaluation: Evaluation) -> str | None:
    """The HTML page of an evaluation of label maps; reads the files of the worst cases again."""
    if not isinstance(evaluation, LabelMapEvaluation):
        return None
    return write_report(evaluation.result, evaluation.files, evaluation.images, evaluation.length_unit)


def write_report(
    result: Mapping[str, Any],
    paths: Mapping[str, tuple[Path, ...]],
    images: Mapping[str, Path],
    length_unit: str = "mm",
) -> str:
    """The HTML page.

    Args:
        result: as `evaluate` returns it.
        paths: for each case the reference, the prediction and, with `compare`, the other prediction.
        images: case to image, for cases that have one.
        length_unit: px: there are no volumes.
    """
    targets = SegmentationTargets.from_plain(result["targets"])
    metrics = _in_unit(selection_of(result).metrics, length_unit)
    charts = []
    for metric in metrics:
        series = _series(result, metric)
        charts.append((metric, distribution(series, metric.unit)))
    metric_definitions = {metric.title: metric.definition for metric in metrics}
    return rendering.render(
        "segmentation_report.html.j2",
        result=result,
        metrics=metrics,
        tolerance=_tolerance(result["tolerance_mm"], length_unit),
        lesion_iou=result["lesion_iou"],
        charts=charts,
        figures=_figures(result),
        legend=_legend(targets),
        worst=_worst_cases(result, paths, images, targets),
        definitions={**metric_definitions, **_DEFINITIONS},
        number=_number,
        p_value=_p_value,
        better=_better,
    )


def _figures(result: Mapping[str, Any]) -> list[tuple[str, bytes, str]]:
    """Title, PNG and note of what features have measured."""
    features = doors.objects(doors.EVALUATIONS)
    return [feature.figure(result) for feature in features if feature.KEY in result]


def _in_unit(metrics: Sequence[Metric], length_unit: str) -> list[Metric]:
    """The metrics with distances in this unit; volumes are in ml, so only if it is mm."""
    if length_unit == "mm":
        return list(metrics)
    return [
        replace(metric, unit=length_unit) if metric.unit == "mm" else metric
        for metric in metrics
        if metric.unit != "ml"
    ]


def _tolerance(by_class: Mapping[str, float], length_unit: str) -> str:
    different = set(by_class.values())
    if len(different) == 1:
        return f"{different.pop():g} {length_unit}"
    return ", ".join(f"{name} {length:g} {length_unit}" for name, length in by_class.items())


def _better(row: Mapping[str, Any], metric: Metric) -> str:
    """CSS class of a significant difference."""
    if row["p_holm"] is None or row["p_holm"] >= _LEVEL:
        return ""
    direction = metric.better or -1  # a signed error is compared without its sign: lower is better
    return "good" if row["difference"] * direction > 0 else "bad"


def _series(result: Mapping[str, Any], metric: Metric) -> list[Series]:
    # shares are drawn in per cent
    scale = 100 if metric.unit == "%" else 1
    cases_by_style = {"a": result["cases"]}
    if "compare" in result:
        cases_by_style["b"] = result["compare"]["cases"]
    series = []
    for name in result["per_class"]:
        for style, cases in cases_by_style.items():
            values = {}
            for row in cases:
                value = row[metric.name][name]
                if value is not None:
                    values[row["case"]] = scale * value
            title = f"{name} {style.upper()}" if len(cases_by_style) > 1 else name
            series.append(Series(title, values, style))
    return series


def _worst_cases(
    result: Mapping[str, Any],
    paths: Mapping[str, tuple[Path, ...]],
    images: Mapping[str, Path],
    targets: SegmentationTargets,
) -> list[dict[str, Any]]:
    """The cases of the lowest mean Dice, for the template."""
    scored = []
    for row in result["cases"]:
        dice = mean(row["dice"].values())
        if dice is not None:
            scored.append((dice, row["case"], row))
    scored.sort(key=lambda entry: entry[:2])  # equal Dice: by case id
    cards = []
    for dice, case, row in scored[:_WORST_CASES]:
        card = _case_card(row, paths[case], images.get(case), targets)
        cards.append({"dice": dice, **card})
    return cards


def _case_card(
    row: Mapping[str, Any], label_paths: tuple[Path, ...], image: Path | None, targets: SegmentationTargets
) -> dict[str, Any]:
    """A case for the template: its picture, and its worst classes."""
    predictions = ["prediction"] if len(label_paths) == 2 else ["prediction A", "prediction B"]
    png, caption = case_picture(label_paths, image, ["reference", *predictions], targets)
    dice = row["dice"]
    # undefined classes last
    worst_first = sorted(dice, key=lambda name: (dice[name] is None, dice[name]))
    worst_classes = set(worst_first[:_WORST_CLASSES])
    return {
        "name": row["case"],
        "row": row,
        "png": png,
        "caption": caption,
        "classes": [name for name in dice if name in worst_classes],  # in one order for all cases
    }


def _legend(targets: SegmentationTargets) -> list[tuple[str, str]]:
    """Colour and class names of each label value in the pictures; with more than seven values, colours
    repeat.
    """
    named_values = list(targets.value_names.items())
    return [(colour(value), name) for value, name in named_values[:_MAX_LEGEND]]


def _number(value: float | None, metric: Metric, signed: bool = False) -> str:
    digits = 2 if metric.unit else 3
    has_sign = signed and metric.better == 0
    if value is None:
        return rendering.number(None, digits, has_sign)
    scale = 100 if metric.unit == "%" else 1
    return rendering.number(float(scale * value), digits, has_sign)


def _p_value(value: float | None) -> str:
    if value is not None and value < 0.001:
        return "< 0.001"
    return rendering.number(value)
