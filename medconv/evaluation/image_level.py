"""Image-level predictions against labels, from tables of both: scores with bootstrap intervals, per class,
per case, and compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from medconv.data.io.images import in_folder
from medconv.evaluation.image_level_report import words, write_report
from medconv.evaluation.labels import recorded_images, train_cases
from medconv.evaluation.rendering import plain_number
from medconv.evaluation.tables import PredictionTable, Truth, read_predictions, read_truth, targets_of
from medconv.metrics import bootstrap
from medconv.targets.image_level import ImageLevelTargets
from medconv.utils.logging import some


@dataclass(frozen=True)
class ImageLevelEvaluation:
    """What `evaluate` found.

    Args: result: the content of the JSON file. outputs, values: of its cases, (cases, names) and (cases,
        values). images: case to image, where known.
    """

    counted: ClassVar[str] = "cases"
    result: dict[str, Any]
    targets: ImageLevelTargets
    outputs: np.ndarray
    values: np.ndarray
    images: Mapping[str, Path]

    def csv_rows(self) -> Iterator[Sequence[Any]]:
        """The header, then a row per case."""
        rows = self.result["cases"]
        cells = [self.targets.case_cells({**row, "values": row["truth"]}) for row in rows]
        yield ["case", "error", *cells[0]]
        for row, own in zip(rows, cells, strict=True):
            yield [row["case"], row["error"], *own.values()]

    def score_lines(self) -> list[str]:
        """Each metric with its interval, then each class, label or number."""
        part = f" of {self.result['part']}" if self.result["part"] else ""
        lines = [f"{len(self.result['cases'])} cases{part}"]
        for name, value in self.result["mean"].items():
            ends = ", ".join(map(plain_number, self.result["intervals"].get(name, ())))
            lines.append(f"{words(name):<20}{plain_number(value):>8}" + (f"  [{ends}]" if ends else ""))
        return [*lines, *(f"  {name}: {_cells(row)}" for name, row in self.result["per_class"].items())]

    def comparison_lines(self) -> list[str]:
        shown = ("difference", "low", "high", "p")
        rows = self.result["comparison"].items()
        return [f"{words(n)} minus that of --compare: {_cells({k: r[k] for k in shown})}" for n, r in rows]

    def page(self) -> str:
        return write_report(self.result, self.targets, self.outputs, self.values, self.images)


def evaluate(
    predictions: Path,
    labels: Path,
    compare: Path | None = None,
    columns: Sequence[str] = (),
    part: str | None = None,
    split: str = "split",
    images: Path | None = None,
) -> ImageLevelEvaluation:
    """Scores of a table of predictions.

    Args: as in `tables.read_truth`; compare: other predictions for the same cases. images: their folder;
        None: the images that the predictions were made from, or that the rows of `labels` name.
    Returns: with the result: `mean`, `intervals` and `per_class` (as `targets.scores`), `cases` (a row
        each), `train_cases` (those that the network was trained on), `without_prediction` (cases with a label
        but no prediction), `without_label` (the reverse: their cells are empty), `targets`, `part`; with
        `compare` also `comparison` (metric to what `metrics.bootstrap.paired` returns).
    Raises: ValueError: tables that cannot be read, or predictions without a label.
    """
    table = read_predictions(predictions, "--predictions")
    targets = targets_of(table, labels, columns)
    truth = read_truth(labels, targets, columns, part, split)
    cases = _common(table, truth, labels, part)
    outputs, values = _arrays(table, truth, cases)
    rows = zip(
        cases, values.tolist(), outputs.tolist(), targets.errors(outputs, values).tolist(), strict=True
    )
    result = {
        "predictions": str(predictions),
        "labels": str(labels),
        "part": part,
        "targets": targets.plain(),
        **targets.scores(outputs, values),
        "cases": [
            {"case": case, "truth": targets.label_cells(value), "outputs": output, "error": error}
            for case, value, output, error in rows
        ],
        "train_cases": train_cases(predictions.parent, cases),
        "without_prediction": sorted(case for case in truth.values if case not in table.outputs),
        "without_label": sorted(case for case in truth.unlabelled if case in table.outputs),
    }
    if compare is not None:
        result |= _compared(compare, targets, table, truth, cases)
    shown = {**truth.images, **recorded_images(predictions.parent)}
    if images is not None:
        shown = in_folder(images, "--images")
    return ImageLevelEvaluation(result, targets, outputs, values, shown)


def _common(predictions: PredictionTable, truth: Truth, labels: Path, part: str | None) -> list[str]:
    """The cases with a prediction and a label. Raises: ValueError: there are none; or, without `part`, a
    prediction has no label.
    """
    unlabelled = [case for case in predictions.outputs if case not in truth.values]
    absent = [case for case in unlabelled if case not in truth.unlabelled]
    cases = [case for case in predictions.outputs if case in truth.values]
    if not cases:
        raise ValueError(
            f"--labels {labels}: none of the cases of {predictions.path}, such as {unlabelled[0]}"
        )
    if absent and part is None:
        raise ValueError(f"--labels {labels}: no row for {some(absent, 20)}")
    return cases


def _arrays(
    predictions: PredictionTable, truth: Truth, cases: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and true values of these cases."""
    values = np.array([truth.values[case] for case in cases], float)
    return np.stack([predictions.outputs[case] for case in cases]), values


def _compared(
    path: Path, targets: ImageLevelTargets, predictions: PredictionTable, truth: Truth, cases: Sequence[str]
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
    comparison = bootstrap.paired(targets, outputs, other_outputs, values)
    trained_on = train_cases(path.parent, shared)
    compare = {"predictions": str(path), "cases": len(shared), "train_cases": trained_on}
    return {"compare": compare, "comparison": comparison}


def _cells(row: Mapping[str, float | None]) -> str:
    return ", ".join(f"{words(name)} {plain_number(value)}" for name, value in row.items())
