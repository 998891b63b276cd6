"""Answers for whole images against the truth: scores with bootstrap intervals, per class, per case, and
compared.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medconv.evaluation.tables import Answers, Truth, kind_of, read_answers, read_truth
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
    """Args: as of `answers.read_truth`; compare: other answers to the same cases.

    Returns: `mean` (metric to value, as `scoring.measure`), `intervals` (metric to its 95 % interval),
        `per_class` (name to metric to value), `cases` (a row each), `without_prediction` (cases of the table
        of labels that have no answer), `image_targets`, `part`, `images`; of a comparison `comparison`
        (metric to what `scoring.paired` gives).
    Raises: ValueError: files at fault, or answers without a label.
    """
    answers = read_answers(predictions, "--predictions")
    image_targets = kind_of(answers, labels, columns)
    truth = read_truth(labels, image_targets, columns, part, split)
    cases = _common(answers, truth, labels, part)
    outputs, values = _arrays(answers, truth, cases)
    result = {
        "predictions": str(predictions),
        "labels": str(labels),
        "part": part,
        "image_targets": image_targets.plain(),
        "mean": image_level.measure(image_targets, outputs, values),
        "intervals": {
            name: list(ends) for name, ends in image_level.intervals(image_targets, outputs, values).items()
        },
        "per_class": image_level.per_name(image_targets, outputs, values),
        "cases": _rows(image_targets, cases, outputs, values),
        "without_prediction": sorted(case for case in truth.values if case not in answers.outputs),
        "images": {case: str(truth.images[case]) for case in cases if case in truth.images},
    }
    return result if compare is None else result | _compared(compare, image_targets, answers, truth, cases)


def write(result: Mapping[str, Any], path: Path) -> None:
    """`path` as JSON, and beside it a CSV with a row per case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(
        path, json.dumps({k: v for k, v in result.items() if k != "images"}, indent=2, allow_nan=False) + "\n"
    )
    text, names = io.StringIO(), result["image_targets"]["names"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            "case",
            "error",
            *(f"truth/{name}" for name in _of_truth(result)),
            *(f"output/{name}" for name in names),
        ]
    )
    for row in result["cases"]:
        writer.writerow([row["case"], row["error"], *row["truth"], *row["outputs"]])
    write_text(path.with_suffix(".csv"), text.getvalue())


def table(result: Mapping[str, Any]) -> str:
    """Each score with its interval, then each class, finding or number."""
    lines = [f"{len(result['cases'])} cases" + (f" of {result['part']}" if result["part"] else "")]
    for name, value in result["mean"].items():
        low, high = result["intervals"].get(name, (None, None))
        ends = "" if low is None else f"  [{_number(low)}, {_number(high)}]"
        lines.append(f"{words(name):<20}{_number(value):>8}{ends}")
    for name, row in result["per_class"].items():
        lines.append(
            f"  {name}: " + ", ".join(f"{words(key)} {_number(value)}" for key, value in row.items())
        )
    if lacking := result["without_prediction"]:
        total = len(lacking) + len(result["cases"])
        lines.append(
            f"{len(lacking)} of {total} cases have no prediction and are in no number: {some(lacking)}"
        )
    for name, row in result.get("comparison", {}).items():
        cells = (f"{key} {_number(row[key])}" for key in ("difference", "low", "high", "p"))
        lines.append(f"{words(name)} minus that of --compare: {', '.join(cells)}")
    return "\n".join(lines)


def words(name: str) -> str:
    """A metric for people."""
    return {"auc": "AUC", "f1": "F1", "mae": "mean absolute error", "rmse": "RMSE", "r2": "R2"}.get(
        name, name.replace("_", " ")
    )


def arrays(result: Mapping[str, Any]) -> tuple[ImageLevelTargets, np.ndarray, np.ndarray]:
    """Outcome, outputs and values of a result's cases, in their order."""
    image_targets = ImageLevelTargets.from_plain(result["image_targets"])
    truth = [
        [image_targets.names.index(v) for v in r["truth"]]
        if image_targets.kind == "multiclass"
        else r["truth"]
        for r in result["cases"]
    ]
    return image_targets, np.array([row["outputs"] for row in result["cases"]], float), np.array(truth, float)


def _common(answers: Answers, truth: Truth, labels: Path, part: str | None) -> list[str]:
    """The cases that are measured. Raises: ValueError: there is none, or, of a whole table, one without a
    label.
    """
    lacking = [case for case in answers.outputs if case not in truth.values]
    cases = [case for case in answers.outputs if case in truth.values]
    if not cases:
        raise ValueError(f"--labels {labels}: none of the cases of {answers.path}, such as {lacking[0]}")
    if lacking and part is None:
        raise ValueError(f"--labels {labels}: no row for {some(lacking, 20)}")
    return cases


def _arrays(answers: Answers, truth: Truth, cases: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([answers.outputs[case] for case in cases]), np.array(
        [truth.values[case] for case in cases], float
    )


def _rows(
    image_targets: ImageLevelTargets, cases: Sequence[str], outputs: np.ndarray, values: np.ndarray
) -> list[dict[str, Any]]:
    off = image_level.errors(image_targets, outputs, values)
    rows = []
    for case, output, value, error in zip(cases, outputs, values, off, strict=True):
        truth = [image_targets.names[int(value[0])]] if image_targets.kind == "multiclass" else value.tolist()
        rows.append({"case": case, "truth": truth, "outputs": output.tolist(), "error": float(error)})
    return rows


def _compared(
    path: Path, image_targets: ImageLevelTargets, answers: Answers, truth: Truth, cases: Sequence[str]
) -> dict[str, Any]:
    others = read_answers(path, "--compare")
    if others.names != answers.names:
        raise ValueError(
            f"--compare {path}: its names differ from those of {answers.path}: {some(others.names)}"
        )
    shared = [case for case in cases if case in others.outputs]
    if not shared:
        raise ValueError(f"--compare {path}: no case that {answers.path} has too")
    (outputs, values), (theirs, _) = (_arrays(one, truth, shared) for one in (answers, others))
    comparison = image_level.paired(image_targets, outputs, theirs, values)
    return {"compare": {"predictions": str(path), "cases": len(shared)}, "comparison": comparison}


def _of_truth(result: Mapping[str, Any]) -> list[str]:
    return (
        ["class"]
        if result["image_targets"]["kind"] == "multiclass"
        else list(result["image_targets"]["names"])
    )


def _number(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"
