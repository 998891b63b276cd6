"""Image-level predictions against labels, from tables of both: scores with bootstrap intervals, per class,
per case, and compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from medconv.data.datasets.tables import PATH_COLUMN
from medconv.data.io.images import in_folder
from medconv.data.io.manifest import read_manifest
from medconv.evaluation.labels import recorded_images, train_cases
from medconv.evaluation.results import Evaluation, plain_number
from medconv.features.image_level import metrics as image_level
from medconv.features.image_level.metrics import words
from medconv.features.image_level.tables import (
    PredictionTable,
    Truth,
    read_predictions,
    read_truth,
    targets_of,
)
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.utils.errors import ArgumentError
from medconv.utils.logging import some


@dataclass(frozen=True)
class ImageLevelEvaluation:
    """The result of `evaluate`.

    Args:
        result: the content of the JSON file: `mean`, `intervals` and `per_class` (as `targets.scores`),
            `cases` (a row each), `train_cases` (those that the network was trained on),
            `without_prediction` (cases with a label but no prediction), `without_label` (the reverse: their
            cells are empty), `targets`, `part` (the split); with `compare` also `compare` and `comparison`
            (metric to what `metrics.paired` returns).
        targets: what the outputs mean.
        outputs: (cases, names).
        values: the true labels, (cases, values).
        images: case to image, for cases that have one.
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
        cells = [
            self.targets.scores.case_cells({**row, "values": values})
            for row, values in zip(rows, self.values.tolist(), strict=True)
        ]
        yield ["case", "error", *cells[0]]
        for row, case_cells in zip(rows, cells, strict=True):
            yield [row["case"], row["error"], *case_cells.values()]

    def score_lines(self) -> list[str]:
        """Each metric with its interval, then each class, label or number."""
        split = f" of {self.result['part']}" if self.result["part"] else ""
        lines = [f"{len(self.result['cases'])} cases{split}"]
        for name, value in self.result["mean"].items():
            line = f"{words(name):<20}{plain_number(value):>8}"
            # an undefined metric has none
            if name in self.result["intervals"]:
                low, high = self.result["intervals"][name]
                line += f"  [{plain_number(low)}, {plain_number(high)}]"
            lines.append(line)
        for name, row in self.result["per_class"].items():
            lines.append(f"  {name}: {_cells(row)}")
        return lines

    def comparison_lines(self) -> list[str]:
        lines = []
        for name, row in self.result["comparison"].items():
            differences = {key: row[key] for key in ("difference", "low", "high", "p")}
            lines.append(f"{words(name)}, predictions minus compare: {_cells(differences)}")
        return lines


def evaluate(
    predictions: Path,
    labels: Path,
    compare: Path | None = None,
    label_columns: Sequence[str] = (),
    split: str | None = None,
    split_column: str = "split",
    images: Path | None = None,
) -> ImageLevelEvaluation:
    """Scores of a table of predictions.

    Args:
        predictions: table of the predictions.
        labels: table of the true labels.
        compare: other predictions for the same cases.
        label_columns: as in `tables.read_truth`.
        split: as in `tables.read_truth`.
        split_column: as in `tables.read_truth`.
        images: folder of the images; None: the images that the predictions were made from, or that the rows
            of `labels` name.
    Raises:
        ValueError: tables that cannot be read, or predictions without a label.
    """
    table = read_predictions(predictions, "predictions")
    targets = targets_of(table, labels, label_columns)
    manifest = read_manifest(predictions.parent)
    path_column = str(manifest.get("path_column", PATH_COLUMN))  # of training
    truth = read_truth(labels, targets, label_columns, split, split_column, path_column, table.outputs)
    # beside label maps, not all of whose cases need have values
    is_beside_maps = "of_image" in (manifest.get("targets") or {})
    cases = _common_cases(table, truth, labels, all_need_rows=split is None and not is_beside_maps)
    outputs, values = _arrays(table, truth, cases)
    result = {
        "predictions": str(predictions),
        "labels": str(labels),
        "part": split,
        "targets": targets.plain(),
        **targets.scores.of_cases(outputs, values),
        "cases": _case_rows(targets, cases, outputs, values),
        "train_cases": train_cases(predictions.parent, cases),
        "without_prediction": sorted(case for case in truth.values if case not in table.outputs),
        "without_label": sorted(
            case
            for case in table.outputs
            if case in truth.unlabelled or (is_beside_maps and case not in truth.values)
        ),
    }
    if compare is not None:
        result |= _comparison(compare, targets, table, truth, cases)
    image_files = _image_files(images, predictions, truth)
    return ImageLevelEvaluation(result, targets, outputs, values, image_files)


def _image_files(images: Path | None, predictions: Path, truth: Truth) -> Mapping[str, Path]:
    """Case to image, for the report."""
    if images is not None:
        return in_folder(images, "images")
    # the images that `predict` recorded replace those that the table of labels names
    return {**truth.images, **recorded_images(predictions.parent)}


def _case_rows(
    targets: ImageLevelTargets, cases: Sequence[str], outputs: np.ndarray, values: np.ndarray
) -> list[dict[str, Any]]:
    errors = targets.errors(outputs, values).tolist()
    columns = zip(cases, values.tolist(), outputs.tolist(), errors, strict=True)
    return [
        {"case": case, "truth": targets.label_cells(case_values), "outputs": case_outputs, "error": error}
        for case, case_values, case_outputs, error in columns
    ]


def _common_cases(
    predictions: PredictionTable, truth: Truth, labels: Path, *, all_need_rows: bool
) -> list[str]:
    """The cases with a prediction and a label.

    Args:
        all_need_rows: not with a split, as cases of the other splits have no row here.
    Raises:
        ValueError: there are none, or a prediction that needs one has no row of labels.
    """
    # in the order of the predictions
    cases = [case for case in predictions.outputs if case in truth.values]
    unlabelled = [case for case in predictions.outputs if case not in truth.values]
    if not cases:
        raise ArgumentError(
            "labels", f" {labels}: none of the cases of {predictions.path}, such as {unlabelled[0]}"
        )
    without_row = [case for case in unlabelled if case not in truth.unlabelled]
    if without_row and all_need_rows:
        raise ArgumentError("labels", f" {labels}: no row for {some(without_row, 20)}")
    return cases


def _arrays(
    predictions: PredictionTable, truth: Truth, cases: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and true values of these cases."""
    outputs = np.stack([predictions.outputs[case] for case in cases])
    values = np.array([truth.values[case] for case in cases], float)
    return outputs, values


def _comparison(
    path: Path, targets: ImageLevelTargets, predictions: PredictionTable, truth: Truth, cases: Sequence[str]
) -> dict[str, Any]:
    """The keys `compare` and `comparison`. Args: path: of the other predictions."""
    compared = read_predictions(path, "compare", targets)
    other = compared.targets
    if other is not None and (other.unbounded, other.exclusive) != (targets.unbounded, targets.exclusive):
        raise ArgumentError("compare", f" {path}: is {other.kind}, expected {targets.kind}")
    if compared.names != predictions.names:
        raise ArgumentError(
            "compare", f" {path}: its names differ from those of {predictions.path}: {some(compared.names)}"
        )
    shared = [case for case in cases if case in compared.outputs]
    if not shared:
        raise ArgumentError("compare", f" {path}: no case in common with {predictions.path}")
    outputs, values = _arrays(predictions, truth, shared)
    compared_outputs, _ = _arrays(compared, truth, shared)
    return {
        "compare": {
            "predictions": str(path),
            "cases": len(shared),
            "train_cases": train_cases(path.parent, shared),
        },
        "comparison": image_level.paired(targets, outputs, compared_outputs, values),
    }


def _cells(row: Mapping[str, float | None]) -> str:
    return ", ".join(f"{words(name)} {plain_number(value)}" for name, value in row.items())


def page(evaluation: Evaluation) -> str | None:
    """The HTML page of an evaluation of a table; without the feature `report` there is none."""
    if not isinstance(evaluation, ImageLevelEvaluation) or find_spec("medconv.features.report") is None:
        return None
    from medconv.features.image_level.report import write_report

    return write_report(
        evaluation.result, evaluation.targets, evaluation.outputs, evaluation.values, evaluation.images
    )
