"""`data=csv`: a table with an image path, its labels, and optionally split and group in each row."""

import csv as files
import difflib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import id_error, ids_of, modalities_of
from medconv.targets import KINDS
from medconv.targets.base import finite_number
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.label_map import LabelMapTargets

log = logging.getLogger(__name__)
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_MAX_CLASSES = 20  # more different whole numbers may be classes or numbers
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


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
) -> Dataset:
    """A case per row; paths are relative to the folder of the table.

    Args:
        label_columns: one column with a class or number, or several with 0 and 1 or numbers; None: `label`.
        split_column, group_column: None takes `split` and `group` if they exist.
        target_type: kind of `ImageLevelTargets`; None: regression if there are fractions, else multiclass for
            one column and multilabel for several.
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
    others = [name for name in (path_column, *columns, split_column, group_column) if name]
    ids = row_ids(path, header, [line for _, line in lines], path_column, others)
    return _dataset(path, ids, rows, _targets(target_type, columns, rows, class_names, path), modality)


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
            delimiter = _delimiter(next((line for line in file if line.strip()), ""))
            file.seek(0)
            reader = files.reader(file, delimiter=delimiter, skipinitialspace=True)
            cells = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except (OSError, UnicodeDecodeError, files.Error) as error:
        raise ValueError(f"{path}: cannot be read as a table ({error})") from error
    (_, header), *rows = cells or [(1, [])]
    duplicates = sorted({name for name in header if name and header.count(name) > 1})
    if duplicates:
        raise ValueError(f"{path}: column {duplicates[0]!r} is there twice")
    if not rows:
        raise ValueError(f"{path}: expected a row per image, found none")
    for number, row in rows:
        if len(_without_empty_end(row)) > len(header):
            raise ValueError(
                f"{path}, row {number}: {len(row)} cells, {len(header)} columns: {' | '.join(row)}; a cell "
                f"that holds {delimiter!r} must be in quotes"
            )
    return [name for name in header if name], [(number, _by_column(header, row)) for number, row in rows]


def _delimiter(header: str) -> str:
    """What follows `case` or `path` at the start; else the most frequent of these outside quotes."""
    outside = re.sub('"[^"]*"', "", header)
    first = re.match('"?(?:case|path)"?([,;\t])', header)
    return first[1] if first else max(",;\t", key=outside.count)


def _without_empty_end(row: Sequence[str]) -> list[str]:
    """A row without the empty cells that spreadsheets add to its end."""
    filled = [number for number, cell in enumerate(row, 1) if cell]
    return list(row[: max(filled, default=0)])


def _by_column(header: Sequence[str], row: Sequence[str]) -> dict[str, str]:
    """Column to cell; missing ones are empty, and those of columns without a name are left out."""
    return {name: cell for name, cell in zip_longest(header, row[: len(header)], fillvalue="") if name}


def is_missing(label: str) -> bool:
    """Whether a cell holds no label: it is empty, or `nan` as pandas may write it."""
    return label.lower() in ("", "nan")


def row_ids(
    table: Path,
    header: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    path_column: str = "path",
    others: Sequence[str] = (),
) -> list[str]:
    """A case id for each row: its cell in the column `case`, or, if these cannot name files or are alike,
    the name of its image as `ids_of`.

    Args: others: columns that hold something else, such as labels, even if one is called `case`.
    Raises: ValueError: as `ids_of`.
    """
    if "case" in header and "case" not in others:
        ids = [row["case"] for row in rows]
        if path_column not in header or (len({*ids}) == len(ids) and not any(map(id_error, ids))):
            return ids
        log.warning("%s: the column 'case' does not name each row; cases are named after their images", table)
    return ids_of([table.parent / row[path_column] for row in rows], table.parent, table)


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
    elif missing := [column for column in columns if is_missing(line[column])]:
        cell = line[missing[0]]
        error = f"column {missing[0]!r} {f'holds {cell}' if cell else 'is empty'}, expected a label"
    labels = {column: "" if is_missing(line[column]) else line[column] for column in columns}
    return _Row(location, file, labels, case_split, line[group] if group else "", error)


def _targets(
    target_type: str | None,
    columns: Sequence[str],
    rows: Sequence[_Row],
    names: Sequence[str] | None,
    path: Path,
) -> ImageLevelTargets:
    labels = [[row.labels[column] for row in rows] for column in columns]
    if not names and target_type in (None, "regression"):
        _check_decimals(columns, labels, path)
    names_of_classes = len(columns) == 1 and len(names or ()) > 1
    kind = target_type or ("multiclass" if names_of_classes else _likely_kind(columns, labels, path))
    if not issubclass(targets := KINDS.get(kind, LabelMapTargets), ImageLevelTargets):
        kinds = [name for name, kind_class in KINDS.items() if issubclass(kind_class, ImageLevelTargets)]
        raise ValueError(f"data.target_type must be one of {', '.join(kinds)}, or null, got {kind!r}")
    try:
        return targets.from_columns(columns, labels, names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_decimals(columns: Sequence[str], labels: Sequence[Sequence[str]], path: Path) -> None:
    """Raises: ValueError: most labels of a column are numbers with a decimal comma."""
    for column, cells in zip(columns, labels, strict=True):
        filled = [cell for cell in cells if cell]
        commas = [cell for cell in filled if _DECIMAL_COMMA.fullmatch(cell)]
        if 2 * len(commas) > len(filled):
            raise ValueError(
                f"{path}: column {column!r} holds numbers with a decimal comma, such as {commas[0]}; "
                "expected a decimal point; if they are classes, set data.target_type=multiclass"
            )


def _likely_kind(columns: Sequence[str], labels: Sequence[Sequence[str]], path: Path) -> str:
    """Regression if most labels are numbers and some are fractions; else multiclass for one column,
    multilabel for several.
    """
    filled = [label for column in labels for label in column if label]
    numbers = {number for label in filled if (number := finite_number(label)) is not None}
    mostly_numbers = 2 * sum(finite_number(label) is not None for label in filled) > len(filled)
    if mostly_numbers and not all(number.is_integer() for number in numbers):
        return "regression"
    if len(columns) == 1 and mostly_numbers and len(numbers) > _MAX_CLASSES:
        raise ValueError(
            f"{path}: column {columns[0]!r} holds {len(numbers)} different whole numbers; set "
            "data.target_type=regression or multiclass"
        )
    return "multiclass" if len(columns) == 1 else "multilabel"


def _dataset(
    path: Path, ids: Sequence[str], rows: Sequence[_Row], targets: ImageLevelTargets, modality: str
) -> Dataset:
    cases, errors = [], {}
    for case, row in zip(ids, rows, strict=True):
        values, error = None, row.error
        try:
            values = targets.parse(row.labels)
        except ValueError as invalid:
            error = error or str(invalid)
        if error:
            errors[case] = f"{row.location}: {error}"
        cases.append(Case(case, (row.path,), values=values, group=row.group, split=row.split))
    modalities = modalities_of([row.path for row in rows if row.error is None], modality)
    ordered, name = tuple(sorted(cases, key=lambda case: case.id)), path.parent.name or path.stem
    return Dataset(name, ordered, targets.names, modalities, errors, targets)
