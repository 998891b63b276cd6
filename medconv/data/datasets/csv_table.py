"""`data=csv`: a table with an image path, its labels, and optionally split and group in each row."""

from __future__ import annotations

import csv as files
import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import ids_of, modalities_of
from medconv.targets.image_level import KINDS, ImageLevelTargets

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_MAX_CLASSES = 100  # more different labels are most likely numbers


@dataclass(frozen=True)
class _Row:
    """Args: location: file and row, for messages. labels: column to text. error: None if the row is valid."""

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
    task: str = "",
) -> Dataset:
    """A case per row; paths are relative to the folder of the table.

    Args:
        label_columns: one column with a class or number, or several with 0 and 1 or numbers; None: `label`.
        split_column, group_column: None takes `split` and `group` if they exist.
        target_type: kind of `ImageLevelTargets`; None: regression if `task` is one, else multiclass for one
            column and multilabel for several.
        class_names: in the order of the outputs; None sorts the labels of the table.
    Raises: ValueError: no such file or column, or no rows. An invalid row becomes an error of its case.
    """
    path = _need_table(root)
    columns = ["label"] if label_columns is None else label_columns
    columns = [columns] if isinstance(columns, str) else list(columns)
    header, lines = read_rows(path)
    split_column = split_column or ("split" if "split" in header else None)
    group_column = group_column or ("group" if "group" in header else None)
    _need_column("data.path_column", path_column, header, path)
    for column in columns:
        _need_column("data.label_columns", column, header, path)
    _need_column("data.split_column", split_column, header, path)
    _need_column("data.group_column", group_column, header, path)
    rows = [
        _row(path, number, line, path_column, columns, split_column, group_column) for number, line in lines
    ]
    image_targets = _targets(_kind(target_type, columns, task), columns, rows, class_names, path)
    return _dataset(path, rows, image_targets, modality)


def _need_table(root: str | Path | None) -> Path:
    if root is None or str(root) == "":
        raise ValueError("data.root is not set: give the table, such as data.root=/data/labels.csv")
    if not Path(root).is_file():
        raise ValueError(f"data.root={root}: no such file, expected a table (CSV)")
    return Path(root)


def read_rows(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Column names, and each row with its line number. Raises: ValueError: no table, or no rows."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            reader = files.DictReader(
                file, delimiter=max(",;\t", key=first.count), restval="", restkey="", skipinitialspace=True
            )
            header = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = header
            lines = [(reader.line_num, {k: v.strip() for k, v in line.items() if k}) for line in reader]
    except (OSError, UnicodeDecodeError, files.Error) as error:
        raise ValueError(f"{path}: cannot be read as a table ({error})") from error
    duplicates = sorted({name for name in header if header.count(name) > 1})
    if duplicates:
        raise ValueError(f"{path}: column {duplicates[0]!r} is there twice")
    if not lines:
        raise ValueError(f"{path}: expected a row per image, found none")
    return header, lines


def _need_column(key: str, column: str | None, header: Sequence[str], path: Path) -> None:
    if column is not None and column not in header:
        near = difflib.get_close_matches(column, header, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{key}: {path} has no column {column!r}, it has {', '.join(header)}{hint}")


def _row(
    table: Path,
    number: int,
    line: Mapping[str, str],
    path: str,
    columns: Sequence[str],
    split: str | None,
    group: str | None,
) -> _Row:
    location, file = f"{table.name}, row {number}", table.parent / line[path]
    case_split = SPLITS.get(line[split].lower(), "") if split else ""
    error = None
    if not line[path]:
        error = f"column {path!r} is empty, expected an image file"
    elif not os.path.exists(file):  # noqa: PTH110 - also for text that is not a path
        error = f"{file}: no such file"
    elif split and not case_split:
        error = f"column {split!r} must be train, val or test, got {line[split]!r}"
    elif group and not line[group]:
        error = f"column {group!r} is empty, expected the name of a group, such as a patient"
    elif empty := [column for column in columns if not line[column]]:
        error = f"column {empty[0]!r} is empty, expected a label"
    labels = {column: line[column] for column in columns}
    return _Row(location, file, labels, case_split, line[group] if group else "", error)


def _kind(target_type: str | None, columns: Sequence[str], task: str) -> str:
    if target_type is not None and target_type not in KINDS:
        raise ValueError(f"data.target_type must be one of {', '.join(KINDS)}, or null, got {target_type!r}")
    default = "multiclass" if len(columns) == 1 else "multilabel"
    kind = target_type or ("regression" if task.endswith("Regression") else default)
    if kind == "multiclass" and len(columns) > 1:
        raise ValueError(
            f"data.target_type=multiclass takes one of data.label_columns, got {', '.join(columns)}; "
            "multilabel takes several"
        )
    return kind


def _targets(
    target_type: str,
    columns: Sequence[str],
    rows: Sequence[_Row],
    class_names: Sequence[str] | None,
    path: Path,
) -> ImageLevelTargets:
    if target_type != "multiclass":
        if class_names and len(class_names) != len(columns):
            raise ValueError(
                f"data.class_names needs a name for each of {', '.join(columns)}, got {list(class_names)}"
            )
        return ImageLevelTargets(target_type, tuple(map(str, class_names or columns)))
    labels = {row.labels[columns[0]] for row in rows} - {""}
    names = tuple(map(str, class_names)) if class_names else tuple(sorted(labels, key=_sort_key))
    if len(names) > _MAX_CLASSES and not class_names:
        raise ValueError(
            f"{path}: {len(names)} different labels in column {columns[0]!r}, expected classes; for "
            "numbers, set task=regression or data.target_type=regression"
        )
    if len(names) < 2:
        raise ValueError(
            f"{path}: column {columns[0]!r} holds {', '.join(names) or 'nothing'}, expected two classes or "
            "more"
        )
    return ImageLevelTargets(target_type, names)


def _sort_key(label: str) -> tuple[float, str]:
    number = _number(label)
    return (math.inf if number is None else number), label


def _number(text: str) -> float | None:
    try:
        return float(text) if math.isfinite(float(text)) else None
    except ValueError:
        return None


def _dataset(path: Path, rows: Sequence[_Row], image_targets: ImageLevelTargets, modality: str) -> Dataset:
    ids = ids_of([row.path for row in rows], path.parent, path)
    cases, errors = [], {}
    for case, row in zip(ids, rows, strict=True):
        values, label_error = _values(row, image_targets)
        if error := row.error or label_error:
            errors[case] = f"{row.location}: {error}"
        cases.append(Case(case, (row.path,), values=values, group=row.group, split=row.split))
    modalities = modalities_of([row.path for row in rows if row.error is None], modality)
    ordered, name = tuple(sorted(cases, key=lambda case: case.id)), path.parent.name or path.stem
    return Dataset(name, ordered, image_targets.names, modalities, errors, image_targets=image_targets)


def _values(row: _Row, image_targets: ImageLevelTargets) -> tuple[tuple[float, ...] | None, str | None]:
    """The values of a row, or an error."""
    labels = list(row.labels.items())
    if image_targets.kind == "multiclass":
        column, label = labels[0]
        if label in image_targets.names:
            return (float(image_targets.names.index(label)),), None
        classes = ", ".join(image_targets.names)
        return None, f"column {column!r}: {label!r} is not a class; the classes are {classes}"
    numbers = [_number(label) for _, label in labels]
    for (column, label), number in zip(labels, numbers, strict=True):
        if number is None:
            return None, f"column {column!r} must hold numbers, got {label!r}"
        if image_targets.kind == "multilabel" and number not in (0, 1):
            rule = f"column {column!r} must hold 0 or 1, got {label!r}"
            return None, f"{rule}; data.target_type=regression takes any number"
    return tuple(number for number in numbers if number is not None), None
