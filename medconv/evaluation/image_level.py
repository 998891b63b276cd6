"""PredictionTable for whole images against the truth: scores with bootstrap intervals, per class, per
case, and compared.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medconv.evaluation.tables import PredictionTable, Truth, read_predictions, read_truth, targets_of
from medconv.metrics import image_level
from medconv.targets.image_level import ImageLevelTargets
from medconv.utils.atomic_io import write_text
from medconv.utils.logging import some


def evaluate(
    predictions: Path,
    labels: Path,
    compare: Path | None = None,
    columns: Sequence[str] = (),
    part: str | None = None,
    split: str = "split",
) -> dict[str, Any]:
    """Scores of a table of predictions.

    Args: as in `tables.read_truth`; compare: other predictions for the same cases.
    Returns: `mean` (metric to value, as `metrics.image_level.measure`), `intervals` (metric to its 95 %
        interval), `per_class` (name to metric to value), `cases` (a row each), `without_prediction` (cases
        with a label but no prediction), `targets`, `part`, `images`; with `compare` also
        `comparison` (metric to what `metrics.image_level.paired` returns).
    Raises: ValueError: tables that cannot be read, or predictions without a label.
    """
    table = read_predictions(predictions, "--predictions")
    image_targets = targets_of(table, labels, columns)
    truth = read_truth(labels, image_targets, columns, part, split)
    cases = _common(table, truth, labels, part)
    outputs, values = _arrays(table, truth, cases)
    result = {
        "predictions": str(predictions),
        "labels": str(labels),
        "part": part,
        "targets": image_targets.plain(),
        "mean": image_level.measure(image_targets, outputs, values),
        "intervals": {
            name: list(ends) for name, ends in image_level.intervals(image_targets, outputs, values).items()
        },
        "per_class": image_targets.per_name(outputs, values),
        "cases": _rows(image_targets, cases, outputs, values),
        "without_prediction": sorted(case for case in truth.values if case not in table.outputs),
        "images": {case: str(truth.images[case]) for case in cases if case in truth.images},
    }
    return result if compare is None else result | _compared(compare, image_targets, table, truth, cases)


def write(result: Mapping[str, Any], path: Path) -> None:
    """`path` as JSON, and beside it a CSV with a row per case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(
        path, json.dumps({k: v for k, v in result.items() if k != "images"}, indent=2, allow_nan=False) + "\n"
    )
    text, names = io.StringIO(), result["targets"]["names"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            "case",
            "error",
            *(f"truth/{name}" for name in ImageLevelTargets.from_plain(result["targets"]).value_names),
            *(f"output/{name}" for name in names),
        ]
    )
    for row in result["cases"]:
        writer.writerow([row["case"], row["error"], *row["truth"], *row["outputs"]])
    write_text(path.with_suffix(".csv"), text.getvalue())


def table(result: Mapping[str, Any]) -> str:
    """Each metric with its interval, then each class, label or number."""
    lines = [f"{len(result['cases'])} cases" + (f" of {result['part']}" if result["part"] else "")]
    for name, value in result["mean"].items():
        low, high = result["intervals"].get(name, (None, None))
        ends = "" if low is None else f"  [{_number(low)}, {_number(high)}]"
        lines.append(f"{words(name):<20}{_number(value):>8}{ends}")
    for name, row in result["per_class"].items():
        lines.append(
            f"  {name}: " + ", ".join(f"{words(key)} {_number(value)}" for key, value in row.items())
        )
    if missing := result["without_prediction"]:
        total = len(missing) + len(result["cases"])
        lines.append(
            f"{len(missing)} of {total} cases have no prediction and are not counted: {some(missing)}"
        )
    for name, row in result.get("comparison", {}).items():
        cells = (f"{key} {_number(row[key])}" for key in ("difference", "low", "high", "p"))
        lines.append(f"{words(name)} minus that of --compare: {', '.join(cells)}")
    return "\n".join(lines)


def words(name: str) -> str:
    """The display name of a metric."""
    return {"auc": "AUC", "f1": "F1", "mae": "mean absolute error", "rmse": "RMSE", "r2": "R2"}.get(
        name, name.replace("_", " ")
    )


def arrays(result: Mapping[str, Any]) -> tuple[ImageLevelTargets, np.ndarray, np.ndarray]:
    """Targets, outputs and true values of a result's cases, in their order."""
    image_targets = ImageLevelTargets.from_plain(result["targets"])
    truth = [
        image_targets.parse(dict(zip(image_targets.value_names, map(str, row["truth"]), strict=True)))
        for row in result["cases"]
    ]
    return image_targets, np.array([row["outputs"] for row in result["cases"]], float), np.array(truth, float)


def _common(predictions: PredictionTable, truth: Truth, labels: Path, part: str | None) -> list[str]:
    """The cases with a prediction and a label. Raises: ValueError: there are none; or, without `part`, a
    prediction has no label.
    """
    unlabelled = [case for case in predictions.outputs if case not in truth.values]
    cases = [case for case in predictions.outputs if case in truth.values]
    if not cases:
        raise ValueError(
            f"--labels {labels}: none of the cases of {predictions.path}, such as {unlabelled[0]}"
        )
    if unlabelled and part is None:
        raise ValueError(f"--labels {labels}: no row for {some(unlabelled, 20)}")
    return cases


def _arrays(
    predictions: PredictionTable, truth: Truth, cases: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and true values of these cases."""
    return np.stack([predictions.outputs[case] for case in cases]), np.array(
        [truth.values[case] for case in cases], float
    )


def _rows(
    image_targets: ImageLevelTargets, cases: Sequence[str], outputs: np.ndarray, values: np.ndarray
) -> list[dict[str, Any]]:
    errors = image_targets.errors(outputs, values)
    rows = []
    for case, output, value, error in zip(cases, outputs, values, errors, strict=True):
        truth = image_targets.label_cells(value.tolist())
        rows.append({"case": case, "truth": truth, "outputs": output.tolist(), "error": float(error)})
    return rows


def _compared(
    path: Path,
    image_targets: ImageLevelTargets,
    predictions: PredictionTable,
    truth: Truth,
    cases: Sequence[str],
) -> dict[str, Any]:
    others = read_predictions(path, "--compare")
    if others.names != predictions.names:
        raise ValueError(
            f"--compare {path}: its names differ from those of {predictions.path}: {some(others.names)}"
        )
    shared = [case for case in cases if case in others.outputs]
    if not shared:
        raise ValueError(f"--compare {path}: no case that {predictions.path} has too")
    outputs, values = _arrays(predictions, truth, shared)
    other_outputs, _ = _arrays(others, truth, shared)
    comparison = image_level.paired(image_targets, outputs, other_outputs, values)
    return {"compare": {"predictions": str(path), "cases": len(shared)}, "comparison": comparison}


def _number(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"
