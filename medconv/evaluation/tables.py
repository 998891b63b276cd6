"""Tables for image-level evaluation: predictions as `medconv predict` writes them, and the cases' true
labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medconv.data.datasets.common import read_json
from medconv.data.datasets.csv_table import SPLITS, is_missing, read_rows, row_ids
from medconv.inference.manifest import MANIFEST
from medconv.inference.output_table import CASE_COLUMNS, column_of
from medconv.targets import Targets
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.multiclass import MulticlassTargets
from medconv.targets.multilabel import MultilabelTargets
from medconv.targets.regression import RegressionTargets
from medconv.utils.logging import some

Rows = list[tuple[int, dict[str, str]]]  # number in the file, and column to text


@dataclass(frozen=True)
class PredictionTable:
    """The predictions to evaluate. Args: outputs: case to its probabilities or numbers, in the order of
    the names.
    targets: None: unknown until the labels are read.
    """

    path: Path
    targets: ImageLevelTargets | None
    names: tuple[str, ...]
    outputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Truth:
    """The true labels. Args: values: case to its values. images: case to the file that its row names.
    unlabelled: cases whose rows lack a label.
    """

    values: Mapping[str, tuple[float, ...]]
    images: Mapping[str, Path]
    unlabelled: Sequence[str] = ()


def read_predictions(path: Path, option: str) -> PredictionTable:
    """Read a table of predictions. The manifest beside it says what the columns mean; without one, a column
    `predicted` means multiclass, and otherwise `targets_of` decides by the labels.

    Raises: ValueError: no such file, or not such a table; names the row.
    """
    header, rows = _table(path, option)
    if "case" not in header:
        raise ValueError(
            f"{option} {path}: no column 'case', expected a table as medconv predict writes it: "
            f"{', '.join(header)}"
        )
    columns = [name for name in header if name not in CASE_COLUMNS]
    renamed = {column_of(name): name for name in CASE_COLUMNS}
    names = tuple(renamed.get(name, name) for name in columns)
    targets: ImageLevelTargets | None = _from_manifest(path, names)
    if targets is None and "predicted" in header and len(names) > 1:
        targets = MulticlassTargets(names)
    numbers, outputs = RegressionTargets(names), {}
    for number, row in rows:
        case, where = row["case"], f"{option} {path}, row {number}"
        if case in outputs:
            raise ValueError(f"{where}: case {case} is there twice")
        outputs[case] = np.array(_parsed(numbers, row, columns, where))
        if targets is not None and not targets.unbounded and not _are_probabilities(outputs[case]):
            raise ValueError(f"{where}: expected probabilities, from 0 to 1")
    return PredictionTable(path, targets, names, outputs)


def targets_of(predictions: PredictionTable, path: Path, columns: Sequence[str]) -> ImageLevelTargets:
    """The targets of the predictions. If these do not say: multilabel if all labels are 0 or 1 and all
    outputs are probabilities, else regression.

    Args: path, columns: of the labels.
    """
    if predictions.targets is not None:
        return predictions.targets
    _, rows = _table(path, "--labels")
    cells = (row.get(column, "").lower() for _, row in rows for column in columns or predictions.names)
    values = {cell for cell in cells if not is_missing(cell)}
    probabilities = map(_are_probabilities, predictions.outputs.values())
    binary = all(probabilities) and values <= {"0", "1", "0.0", "1.0", "true", "false"}
    return MultilabelTargets(predictions.names) if binary else RegressionTargets(predictions.names)


def read_truth(
    path: Path,
    targets: ImageLevelTargets,
    columns: Sequence[str] = (),
    part: str | None = None,
    split: str = "split",
) -> Truth:
    """Read a table of true labels.

    A row is for the case in its column `case`, or for the image in its column `path` (relative to the table's
    folder).
    Args: columns: of the labels; none: `label` for multiclass, else the names of the targets. part: read only
        rows with this value in the column `split`.
    Raises: ValueError: no such file or column, or a label that does not fit; names the row.
    """
    header, rows = _table(path, "--labels")
    columns = _in_order(columns, targets) if columns else list(targets.default_columns)
    for column in (*columns, *([split] if part is not None else [])):
        if column not in header:
            raise ValueError(f"--labels {path}: no column {column!r}; it has {', '.join(header)}")
    if not {"case", "path"} & set(header):
        raise ValueError(
            f"--labels {path}: a column 'case' or 'path' is needed, to tell which case a row is for"
        )
    files = [path.parent / row["path"] for _, row in rows] if "path" in header else []
    # A label may be called `case`; then `path` tells the case.
    ids = row_ids(path, header, [row for _, row in rows], others=columns if files else ())
    values: dict[str, tuple[float, ...]] = {}
    unlabelled: dict[str, None] = {}  # in order
    for case, (number, row) in zip(ids, rows, strict=True):
        if part is not None and SPLITS.get(row[split].lower(), row[split]) != part:
            continue
        if case in values or case in unlabelled:
            raise ValueError(f"--labels {path}, row {number}: case {case} is there twice")
        if any(is_missing(row[column]) for column in columns):
            unlabelled[case] = None
            continue
        values[case] = _parsed(targets, row, columns, f"--labels {path}, row {number}")
    if not values:
        which = f" whose column {split!r} is {part}" if part is not None else ""
        raise ValueError(f"--labels {path}: no row{which}" + (" with a label" if unlabelled else ""))
    return Truth(values, dict(zip(ids, files, strict=True)) if files else {}, tuple(unlabelled))


def _in_order(columns: Sequence[str], targets: ImageLevelTargets) -> list[str]:
    """`--label-columns` in the order of the targets' names, where they are these names.

    Raises: ValueError: too few or too many, or some of them are names of other predictions.
    """
    if len(columns) != targets.num_values:
        raise ValueError(
            f"--label-columns: expected {targets.num_values} for {targets.kind}, got {', '.join(columns)}"
        )
    names = list(targets.value_names)
    if sorted(columns) == sorted(names):
        return names
    for column, name in zip(columns, names, strict=True):
        if column != name and column in names:
            raise ValueError(
                f"--label-columns: {column} would be compared with the predictions of {name}; expected a "
                f"column for each of {', '.join(names)}, in this order"
            )
    return list(columns)


def _parsed(
    targets: ImageLevelTargets, row: Mapping[str, str], columns: Sequence[str], where: str
) -> tuple[float, ...]:
    try:
        return targets.parse({column: row[column] for column in columns})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _are_probabilities(outputs: np.ndarray) -> bool:
    return bool(((outputs >= 0) & (outputs <= 1)).all())


def _from_manifest(path: Path, names: tuple[str, ...]) -> ImageLevelTargets | None:
    """The targets in the manifest beside the table, if any. Raises: ValueError: it is the manifest of another
    table.
    """
    manifest = path.with_name(MANIFEST)
    if not manifest.exists():
        return None
    content = read_json(manifest)
    if not isinstance(content, dict) or "targets" not in content:
        return None
    try:
        targets = Targets.from_plain(content["targets"])
    except ValueError as error:
        raise ValueError(f"{manifest}: {error}") from error
    if not isinstance(targets, ImageLevelTargets):
        return None  # of label maps beside the table
    if targets.names != names:
        raise ValueError(
            f"{path}: its columns are {some(names)}, but {manifest.name} beside it has {some(targets.names)}"
        )
    # Errors are in standard deviations of the truth, not of the training cases.
    return type(targets)(names)


def _table(path: Path, option: str) -> tuple[list[str], Rows]:
    if not path.is_file():
        raise ValueError(f"{option} {path}: no such file, expected a table (CSV)")
    return read_rows(path)
