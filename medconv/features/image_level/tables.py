"""Tables for image-level evaluation: predictions as `medconv predict` writes them, and the cases' true
labels.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medconv.data.datasets.common import read_json
from medconv.data.datasets.tables import (
    PATH_COLUMN,
    case_of_row,
    is_missing,
    path_column_of,
    read_rows,
    row_ids,
)
from medconv.data.io.manifest import MANIFEST
from medconv.features.image_level.csv_table import SPLITS
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.multilabel import MultilabelTargets
from medconv.features.image_level.output import CASE_COLUMNS, column_of
from medconv.features.image_level.regression import RegressionTargets
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.targets import Targets
from medconv.utils.logging import some

log = logging.getLogger(__name__)
Row = tuple[int, dict[str, str]]  # number in the file, and column to text
_BINARY_CELLS = {"0", "1", "0.0", "1.0", "true", "false", "-1", "-1.0"}


@dataclass(frozen=True)
class PredictionTable:
    """The predictions to evaluate.

    Args:
        path: of the table.
        targets: None: unknown until the labels are read.
        names: of the classes, labels or numbers.
        outputs: case to its probabilities or numbers, in the order of the names.
    """

    path: Path
    targets: ImageLevelTargets | None
    names: tuple[str, ...]
    outputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Truth:
    """The true labels.

    Args:
        values: case to its values.
        images: case to the file that its row names.
        unlabelled: cases whose rows lack a label.
    """

    values: Mapping[str, tuple[float, ...]]
    images: Mapping[str, Path]
    unlabelled: Sequence[str] = ()


def read_predictions(path: Path, argument: str, like: ImageLevelTargets | None = None) -> PredictionTable:
    """Read a table of predictions. The manifest beside it says what the columns mean; without one, a column
    `predicted` means multiclass, and otherwise `targets_of` decides by the labels.

    Args:
        path: of the table.
        argument: its name, for messages.
        like: what the outputs mean where the table does not say so.
    Raises:
        ValueError: no such file, or not such a table; names the row.
    """
    header, rows = _read_table(path, argument)
    if "case" not in header:
        raise ValueError(
            f"{argument} {path}: no column 'case', expected a table as medconv predict writes it: "
            f"{', '.join(header)}"
        )
    columns = [name for name in header if name not in CASE_COLUMNS]
    # `predict` renames the column of a class that is called `case` or `predicted`
    original_names = {column_of(name): name for name in CASE_COLUMNS}
    names = tuple(original_names.get(column, column) for column in columns)
    targets: ImageLevelTargets | None = _from_manifest(path, names)
    meaning = targets or like
    if meaning is None and "predicted" in header and len(names) > 1:
        targets = meaning = MulticlassTargets(names)
    are_probabilities = meaning is not None and not meaning.unbounded
    parser = RegressionTargets(names)  # takes any finite number
    outputs: dict[str, np.ndarray] = {}
    others = []  # cases whose class is not the most probable one
    for number, row in rows:
        case = row["case"]
        position = f"{argument} {path}, row {number}"
        if case in outputs:
            raise ValueError(f"{position}: case {case} is there twice")
        outputs[case] = np.array(_parsed(parser, row, columns, position))
        if are_probabilities and not _are_probabilities(outputs[case]):
            raise ValueError(f"{position}: expected probabilities, from 0 to 1")
        stated = row.get("predicted")
        if isinstance(meaning, MulticlassTargets) and stated in names:
            is_largest = np.isclose(outputs[case][names.index(stated)], outputs[case].max(), atol=1e-4)
            others += [] if is_largest else [case]
    if others:
        log.warning(
            "%s %s: the class in column 'predicted' is not the most probable one in %d of %d rows; the "
            "scores are those of the most probable class: %s",
            *(argument, path, len(others), len(rows), some(others)),
        )
    return PredictionTable(path, targets, names, outputs)


def targets_of(predictions: PredictionTable, labels: Path, label_columns: Sequence[str]) -> ImageLevelTargets:
    """The targets of the predictions. If these do not say: multilabel if all labels are 0 or 1 and all
    outputs are probabilities, else regression.

    Args:
        predictions: the predictions.
        labels: table of the labels.
        label_columns: its columns; none: the names of the predictions.
    """
    if predictions.targets is not None:
        return predictions.targets
    _, rows = _read_table(labels, "labels")
    values = set()
    for _, row in rows:
        for column in label_columns or predictions.names:
            values.add(row.get(column, "").lower())
    are_binary = all(value in _BINARY_CELLS or is_missing(value) for value in values)
    if are_binary and all(map(_are_probabilities, predictions.outputs.values())):
        return MultilabelTargets(predictions.names)
    return RegressionTargets(predictions.names)


def read_truth(
    path: Path,
    targets: ImageLevelTargets,
    label_columns: Sequence[str] = (),
    split: str | None = None,
    split_column: str = "split",
    path_column: str = PATH_COLUMN,
    predicted: Collection[str] = (),
) -> Truth:
    """Read a table of true labels.

    A row is for the case in its column `case`, or for the image in its column of files (relative to the
    table's folder).

    Args:
        path: of the table.
        targets: of the predictions.
        label_columns: of the labels; none: `label` for multiclass, else the names of the targets.
        split: read only rows with this value in the split column; None: all.
        split_column: its name.
        path_column: with the image files; `path` is taken, too.
        predicted: ids of cases, which may lack the number of a channel that a row's file has.
    Raises:
        ValueError: no such file or column, or a label that does not fit; names the row.
    """
    header, rows = _read_table(path, "labels")
    columns = list(targets.default_columns)
    if label_columns:
        columns = _in_order(label_columns, targets)
    files = path_column_of(header, path_column)
    _check_header(path, header, columns if split is None else [*columns, split_column])
    if files is None and "case" not in header:
        accepted = " or ".join(map(repr, dict.fromkeys(["case", path_column, PATH_COLUMN])))
        raise ValueError(f"labels {path}: a column {accepted} is needed, to tell which case a row is for")
    # A label may be called `case`; then the image tells the case.
    used = columns if files is not None and rows else ()
    row_names = row_ids(path, header, [row for _, row in rows], files or PATH_COLUMN, used)
    ids = [case_of_row(name, predicted) for name in row_names]
    cases = list(zip(ids, rows, strict=True))
    if split is not None:
        cases = [(case, row) for case, row in cases if _split_of(row[1], split_column) == split]
    values, unlabelled = _values_of(cases, targets, columns, path)
    if not values:
        condition = f" whose column {split_column!r} is {split}" if split is not None else ""
        condition += " with a label" if unlabelled else ""
        raise ValueError(f"labels {path}: no row{condition}")
    images = {}
    if files is not None:
        images = {case: path.parent / row[files] for case, (_, row) in zip(ids, rows, strict=True)}
    return Truth(values, images, unlabelled)


def _values_of(
    cases: Sequence[tuple[str, Row]], targets: ImageLevelTargets, columns: Sequence[str], path: Path
) -> tuple[dict[str, tuple[float, ...]], tuple[str, ...]]:
    """Case to its values, and the cases without a label."""
    values: dict[str, tuple[float, ...]] = {}
    unlabelled: dict[str, None] = {}  # a set in order
    for case, (number, row) in cases:
        position = f"labels {path}, row {number}"
        if case in values or case in unlabelled:
            raise ValueError(f"{position}: case {case} is there twice")
        cells = {column: "" if is_missing(row[column], targets.names) else row[column] for column in columns}
        lacks = [not cell for cell in cells.values()]
        parsed: tuple[float, ...] = ()
        if not any(lacks) or (targets.takes_missing and not all(lacks)):
            parsed = _parsed(targets, cells, columns, position)
        if all(map(math.isnan, parsed)):  # missing ones may have a number, such as -1
            unlabelled[case] = None
        else:
            values[case] = parsed
    return values, tuple(unlabelled)


def _check_header(path: Path, header: Sequence[str], columns: Sequence[str]) -> None:
    for column in columns:
        if column not in header:
            raise ValueError(f"labels {path}: no column {column!r}; it has {', '.join(header)}")


def _split_of(row: Mapping[str, str], split_column: str) -> str:
    cell = row[split_column]
    return SPLITS.get(cell.lower(), cell)


def _in_order(columns: Sequence[str], targets: ImageLevelTargets) -> list[str]:
    """The label columns in the order of the targets' names, where they are these names.

    Raises:
        ValueError: too few or too many, or some of them are names of other predictions.
    """
    if len(columns) != targets.num_values:
        raise ValueError(
            f"label columns: expected {targets.num_values} for {targets.kind}, got {', '.join(columns)}"
        )
    # the same names in another order are certain to belong together
    names = list(targets.value_names)
    if sorted(columns) == sorted(names):
        return names
    for column, name in zip(columns, names, strict=True):
        if column != name and column in names:
            raise ValueError(
                f"label columns: {column} would be compared with the predictions of {name}; expected a "
                f"column for each of {', '.join(names)}, in this order"
            )
    return list(columns)


def _parsed(
    targets: ImageLevelTargets, row: Mapping[str, str], columns: Sequence[str], position: str
) -> tuple[float, ...]:
    """The values of a row. Args: position: of the row, for messages."""
    cells = {column: row[column] for column in columns}
    try:
        return targets.parse(cells)
    except ValueError as error:
        raise ValueError(f"{position}: {error}") from error


def _are_probabilities(outputs: np.ndarray) -> bool:
    is_in_range = (outputs >= 0) & (outputs <= 1)
    return bool(is_in_range.all())


def _from_manifest(path: Path, names: tuple[str, ...]) -> ImageLevelTargets | None:
    """The targets in the manifest beside the table, if any.

    Raises:
        ValueError: it is the manifest of another table.
    """
    manifest = path.with_name(MANIFEST)
    if not manifest.exists():
        return None
    content = read_json(manifest)
    if not isinstance(content, dict) or "targets" not in content:
        return None
    try:
        targets = Targets.from_plain(content["targets"]).of_table
    except ValueError as error:
        raise ValueError(f"{manifest}: {error}") from error
    if not isinstance(targets, ImageLevelTargets):
        return None  # of label maps alone, beside a table of somebody else
    if targets.names != names:
        raise ValueError(
            f"{path}: its columns are {some(names)}, but {manifest.name} beside it has {some(targets.names)}"
        )
    # Errors are in standard deviations of the truth, not of the training cases.
    return type(targets)(names)


def _read_table(path: Path, argument: str) -> tuple[list[str], list[Row]]:
    """Header and rows. Args: argument: the name of the table, for messages."""
    if not path.is_file():
        raise ValueError(f"{argument} {path}: no such file, expected a table (CSV)")
    return read_rows(path)
