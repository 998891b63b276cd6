"""`data=csv`: a table with an image path, its labels, and optionally split and group in each row."""

import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import modalities_of
from medconv.data.datasets.tables import is_missing, read_rows, row_ids
from medconv.features.image_level.table_targets import targets_of_columns
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.utils.errors import Argument, ArgumentError

log = logging.getLogger(__name__)

# Names of a split in tables and folders, in small letters
SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}


@dataclass(frozen=True)
class _Columns:
    """Names of the columns of a table.

    Args:
        path: image files.
        labels: one or several.
        split: None: the table defines no splits.
        group: None: each case is its own group.
        class_names: words that are labels even if they usually stand for no value.
    """

    path: str
    labels: list[str]
    split: str | None
    group: str | None
    class_names: Sequence[str]

    @property
    def names(self) -> list[str]:
        names = [self.path, *self.labels, self.split, self.group]
        return [name for name in names if name]

    def text(self, cell: str) -> str:
        """The label in a cell; empty where it stands for no value."""
        return "" if is_missing(cell, self.class_names) else cell

    def missing(self, row: "_Row", targets: ImageLevelTargets) -> str | None:
        """What is wrong with a row that lacks a label; None: nothing."""
        if targets.takes_missing:
            return None
        lacking = [column for column, cell in row.labels.items() if not self.text(cell)]
        return missing_error(lacking[0], row.labels[lacking[0]], targets.expected_cell) if lacking else None


@dataclass(frozen=True)
class _Row:
    """A row of a table.

    Args:
        location: file and row, for messages.
        path: the image.
        labels: column to text, of all labels.
        split: `train`, `val`, `test` or empty.
        group: empty: the case is its own group.
        error: None: the row is valid.
    """

    location: str
    path: Path
    labels: Mapping[str, str]
    split: str
    group: str
    error: str | None


def csv(
    root: str | Path | None,
    path_column: str = "path",
    label_columns: Sequence[str] | str | None = None,
    split_column: str | None = None,
    group_column: str | None = None,
    target_type: str | None = None,
    class_names: Sequence[str] | None = None,
    modality: str = "MRI",
) -> Dataset:
    """A case per row; paths are relative to the folder of the table.

    Args:
        root: the table.
        path_column: column of the image files.
        label_columns: one column with a class or number, or several with 0 and 1 or numbers; None: `label`.
        split_column: None takes `split` if it exists.
        group_column: None takes `group` if it exists.
        target_type: kind of `ImageLevelTargets`; None: regression if there are fractions, else multiclass for
            one column and multilabel for several.
        class_names: in the order of the outputs; None sorts the labels of the table.
        modality: of volumes; pictures have their colours as channels.

    Raises:
        ValueError: no such file or column, or no rows. An invalid row becomes an error of its case.
    """
    path = _table_path(root)
    header, numbered_rows = read_rows(path)
    columns = _Columns(
        path=path_column,
        labels=_as_list(label_columns),
        split=split_column or ("split" if "split" in header else None),
        group=group_column or ("group" if "group" in header else None),
        class_names=tuple(map(str, class_names or ())),
    )
    _check_columns(columns, header, path)
    rows = [_parse_row(path, number, cells, columns) for number, cells in numbered_rows]
    cells_of_rows = [cells for _, cells in numbered_rows]
    case_ids = row_ids(path, header, cells_of_rows, path_column, used_columns=columns.names)
    labels = [[columns.text(row.labels[column]) for row in rows] for column in columns.labels]
    targets = targets_of_columns(columns.labels, labels, target_type, class_names, path)
    return _dataset(path, case_ids, rows, targets, columns, modality)


def _table_path(root: str | Path | None) -> Path:
    """Raises: ValueError: no file."""
    if root is None or str(root) == "":
        raise ArgumentError(
            "root", " is not set: give the table, such as ", Argument("root"), "=/data/labels.csv"
        )
    if not Path(root).is_file():
        raise ArgumentError("root", f"={root}: no such file, expected a table (CSV)")
    return Path(root)


def _as_list(label_columns: Sequence[str] | str | None) -> list[str]:
    if label_columns is None:
        return ["label"]
    return [label_columns] if isinstance(label_columns, str) else list(label_columns)


def _check_columns(columns: _Columns, header: Sequence[str], path: Path) -> None:
    """Raises: ValueError: a column that the table lacks."""
    _check_column("path_column", columns.path, header, path)
    for label_column in columns.labels:
        _check_column("label_columns", label_column, header, path)
    _check_column("split_column", columns.split, header, path)
    _check_column("group_column", columns.group, header, path)


def _check_column(name: str, column: str | None, header: Sequence[str], path: Path) -> None:
    if column is None or column in header:
        return
    nearest = difflib.get_close_matches(column, header, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ArgumentError(name, f": {path} has no column {column!r}, it has {', '.join(header)}{hint}")


def _parse_row(table: Path, number: int, cells: Mapping[str, str], columns: _Columns) -> _Row:
    """A row of a table; what is wrong with it becomes its error."""
    path = table.parent / cells[columns.path]
    split = SPLITS.get(cells[columns.split].lower(), "") if columns.split else ""
    labels = {column: cells[column] for column in columns.labels}
    return _Row(
        location=f"{table.name}, row {number}",
        path=path,
        labels=labels,
        split=split,
        group=cells[columns.group] if columns.group else "",
        error=_row_error(path, cells, split, columns),
    )


def _row_error(path: Path, cells: Mapping[str, str], split: str, columns: _Columns) -> str | None:
    """What is wrong with the cells of a row; None: nothing."""
    if not cells[columns.path]:
        return f"column {columns.path!r} is empty, expected an image file"
    if not os.path.exists(path):  # noqa: PTH110 - also for text that is not a path
        return f"{path}: no such file"
    if columns.split and not split:
        return f"column {columns.split!r} must be train, val or test, got {cells[columns.split]!r}"
    if columns.group and is_missing(cells[columns.group]):
        return missing_error(columns.group, cells[columns.group], "the name of a group, such as a patient")
    return None


def _dataset(
    path: Path,
    case_ids: Sequence[str],
    rows: Sequence[_Row],
    targets: ImageLevelTargets,
    columns: _Columns,
    modality: str,
) -> Dataset:
    cases: list[Case] = []
    errors: dict[str, str] = {}
    for case_id, row in zip(case_ids, rows, strict=True):
        values = None
        error = row.error or columns.missing(row, targets)
        try:
            values = targets.parse({column: columns.text(cell) for column, cell in row.labels.items()})
        except ValueError as label_error:
            error = error or str(label_error)
        if error:
            errors[case_id] = f"{row.location}: {error}"
        case = Case(id=case_id, images=(row.path,), values=values, group=row.group, split=row.split)
        cases.append(case)
    readable = [row.path for row in rows if row.error is None]
    return Dataset(
        name=path.parent.name or path.stem,
        cases=tuple(sorted(cases, key=lambda case: case.id)),
        class_names=targets.names,
        modalities=modalities_of(readable, modality),
        errors=errors,
        targets=targets,
    )


def missing_error(column: str, cell: str, expected: str) -> str:
    """What is wrong with a cell that `is_missing`.

    Args:
        column: its name.
        cell: its text.
        expected: what it must hold, such as `a label`.
    """
    if not cell:
        return f"column {column!r} is empty, expected {expected}"
    return f"column {column!r} holds {cell}, which stands for no value; expected {expected}"
