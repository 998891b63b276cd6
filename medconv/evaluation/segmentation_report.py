"""HTML report of a segmentation evaluation: tables, distributions, and pictures of the worst cases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medconv.evaluation import predicted_quality, rendering
from medconv.evaluation.distributions import Series, distribution
from medconv.evaluation.overlays import case_png
from medconv.metrics import visualization
from medconv.metrics.dice import mean
from medconv.metrics.segmentation import Metric, metrics_of
from medconv.targets.segmentation import SegmentationTargets

_WORST_CASES = 6
_WORST_CLASSES = 8  # of each worst case
_MAX_LEGEND = 40  # label values
_DEFINITIONS = {
    "Missing class": "in both label maps: no value, the case is not counted (n). In one of the two: Dice "
    "and surface Dice are 0, distances are the length of the image from corner to corner.",
    "sd, interval": "standard deviation over cases (n - 1); 95 % bootstrap interval of the mean.",
}


def write_report(
    result: Mapping[str, Any], paths: Mapping[str, tuple[Path, ...]], images: Mapping[str, Path]
) -> str:
    """The HTML page.

    Args: result: as `evaluate` returns it. paths: for each case the reference, the prediction, and that of
        `--compare`. images: case to image, where known.
    """
    targets = SegmentationTargets.from_plain(result["targets"])
    metrics = metrics_of(result["lesion_iou"])
    return rendering.render(
        "segmentation_report.html.j2",
        result=result,
        metrics=metrics,
        tolerance=_tolerance(result["tolerance_mm"]),
        lesion_iou=result["lesion_iou"],
        charts=[(metric, distribution(_series(result, metric), metric.unit)) for metric in metrics],
        quality_chart=_quality_chart(result),
        legend=_legend(targets),
        worst=_worst(result, paths, images, targets.ignore),
        definitions={**{metric.title: metric.definition for metric in metrics}, **_DEFINITIONS},
        number=_number,
        p_value=_p,
        better=_better,
    )


def _quality_chart(result: Mapping[str, Any]) -> bytes | None:
    if "quality" not in result:
        return None
    true = {row["case"]: row["dice"] for row in result["cases"]}
    return predicted_quality.chart(result["quality"]["cases"], true, list(result["per_class"]))


def _tolerance(by_class: Mapping[str, float]) -> str:
    if len(set(by_class.values())) == 1:
        return f"{next(iter(by_class.values())):g} mm"
    return ", ".join(f"{name} {mm:g} mm" for name, mm in by_class.items())


def _better(row: Mapping[str, Any], metric: Metric) -> str:
    """CSS class of a significant difference."""
    if row["p_holm"] is None or row["p_holm"] >= 0.05:
        return ""
    return "good" if row["difference"] * (metric.better or -1) > 0 else "bad"


def _series(result: Mapping[str, Any], metric: Metric) -> list[Series]:
    sets = [("a", result["cases"])] + ([("b", result["compare"]["cases"])] if "compare" in result else [])
    scale = 100 if metric.unit == "%" else 1
    rows = []
    for name in result["per_class"]:
        for style, cases in sets:
            by_case = {row["case"]: row[metric.name][name] for row in cases}
            values = {case: scale * value for case, value in by_case.items() if value is not None}
            rows.append(Series(f"{name} {style.upper()}" if len(sets) > 1 else name, values, style))
    return rows


def _worst(
    result: Mapping[str, Any],
    paths: Mapping[str, tuple[Path, ...]],
    images: Mapping[str, Path],
    ignore: int | None,
) -> list[dict[str, Any]]:
    scored = [(mean(row["dice"]), row["case"], row) for row in result["cases"]]
    worst = sorted((entry for entry in scored if entry[0] is not None), key=lambda entry: entry[:2])
    return [
        {"dice": dice, **_case(row, paths[case], images.get(case), ignore)}
        for dice, case, row in worst[:_WORST_CASES]
    ]


def _case(
    row: Mapping[str, Any], labels: tuple[Path, ...], image: Path | None, ignore: int | None
) -> dict[str, Any]:
    """A case for the template: its picture, and its worst classes."""
    error = ""
    try:
        png = case_png(labels, image, ignore)
    except ValueError as reason:
        png, error, image = case_png(labels, None, ignore), f"; without the image: {reason}", None
    predictions = ["prediction"] if len(labels) == 2 else ["prediction A", "prediction B"]
    columns, dice = ["reference", *predictions], row["dice"]
    classes = sorted(dice, key=lambda name: (dice[name] is None, dice[name]))[:_WORST_CLASSES]
    caption = ", ".join((["image"] if image else []) + columns) + error
    return {"name": row["case"], "row": row, "png": png, "caption": caption, "classes": classes}


def _legend(targets: SegmentationTargets) -> list[tuple[str, str]]:
    """Colour and class names of each label value in the pictures; with more than seven values, colours
    repeat.
    """
    named = list(targets.value_names.items())[:_MAX_LEGEND]
    return [(visualization.colour(value), name) for value, name in named]


def _number(value: float | None, metric: Metric, signed: bool = False) -> str:
    scaled = None if value is None else float(100 * value if metric.unit == "%" else value)
    return rendering.number(scaled, 2 if metric.unit else 3, signed and metric.better == 0)


def _p(value: float | None) -> str:
    return "< 0.001" if value is not None and value < 0.001 else rendering.number(value)
