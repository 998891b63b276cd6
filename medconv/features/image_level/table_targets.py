"""Targets of the label columns of a table: their kind, if it is not set, follows from the labels."""

import re
from collections.abc import Sequence
from pathlib import Path

from medconv.data.datasets.tables import spelling_error
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.targets import ImageLevelTargets
from medconv.targets import all_kinds
from medconv.targets.base import finite_number
from medconv.targets.label_map import LabelMapTargets
from medconv.utils.errors import ArgumentError

Labels = Sequence[Sequence[str]]  # for each column, the text of each row; empty where there is none

_MAX_CLASSES = 20  # more different whole numbers may be classes or numbers
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_SEPARATORS = re.compile("[|;]")


def targets_of_columns(
    columns: Sequence[str],
    labels: Labels,
    target_type: str | None,
    class_names: Sequence[str] | None,
    path: Path,
) -> ImageLevelTargets:
    """The targets of a table.

    Args:
        columns: names of one or several columns.
        labels: the texts of each column.
        target_type: kind of `ImageLevelTargets`; None: by class names and labels.
        class_names: in the order of the outputs; None: from the labels.
        path: of the table, for messages.

    Raises:
        ValueError: an unknown kind, or labels that do not fit it.
    """
    if not class_names and target_type in (None, "regression", "ordinal"):
        _check_decimals(columns, labels, path)
    if target_type:
        kind = target_type
    elif len(columns) == 1 and len(class_names or ()) > 1:
        kind = "multiclass"  # of one column, several names are those of classes
    else:
        kind = _likely_kind(columns, labels, path)
    kinds = all_kinds()
    targets = kinds.get(kind, LabelMapTargets)
    if not issubclass(targets, ImageLevelTargets):
        fitting = [name for name, kind_class in kinds.items() if issubclass(kind_class, ImageLevelTargets)]
        raise ArgumentError("target_type", f" must be one of {', '.join(fitting)}, or None, got {kind!r}")
    try:
        of_columns = targets.from_columns(columns, labels, class_names)
    except ArgumentError:  # it is not about the table
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    are_from_cells = isinstance(of_columns, MulticlassTargets) and not class_names
    problem = None
    if are_from_cells:
        problem = spelling_error(of_columns.names) or _joined_names(of_columns.names)
    if problem:
        raise ValueError(
            f"{path}: column {columns[0]!r} holds {problem}; correct the table, or list all in class_names"
        )
    return of_columns


def _joined_names(names: Sequence[str]) -> str | None:
    """What is wrong with the labels of a column: some list several of the others, such as `a|b`."""
    for name in names:
        parts = [part.strip() for part in _SEPARATORS.split(name)]
        if len(parts) > 1 and not {*names}.isdisjoint(parts):
            return (
                f"several labels in one cell, such as {name!r}; expected a column of 0 and 1 for each label"
            )
    return None


def _check_decimals(columns: Sequence[str], labels: Labels, path: Path) -> None:
    """Raises: ValueError: most labels of a column are numbers with a decimal comma."""
    for column, column_labels in zip(columns, labels, strict=True):
        filled = [label for label in column_labels if label]
        with_comma = [label for label in filled if _DECIMAL_COMMA.fullmatch(label)]
        if 2 * len(with_comma) > len(filled):
            raise ValueError(
                f"{path}: column {column!r} holds numbers with a decimal comma, such as {with_comma[0]}; "
                "expected a decimal point; if they are classes, set target_type=multiclass"
            )


def _likely_kind(columns: Sequence[str], labels: Labels, path: Path) -> str:
    """The kind of targets that labels suggest.

    Regression if most labels are numbers and some are fractions; else multiclass for one column, multilabel
    for several.

    Raises: ValueError: whole numbers that may be classes or numbers: so many, or such as ages from 60 to 75.
    """
    filled = [label for column_labels in labels for label in column_labels if label]
    parsed = [finite_number(label) for label in filled]
    numbers = [number for number in parsed if number is not None]
    are_numbers = 2 * len(numbers) > len(filled)
    if are_numbers and not all(number.is_integer() for number in numbers):
        return "regression"
    if len(columns) > 1:
        return "multilabel"
    different = sorted(set(numbers))
    num_different = len(different)
    # Classes are mostly numbered from 0 or 1; two values are an answer of yes or no, however they are written
    counts_up = num_different < 3 or (different[0] >= 0 and different[-1] < 2 * num_different)
    if are_numbers and (num_different > _MAX_CLASSES or not counts_up):
        raise ArgumentError(
            "target_type",
            f" is needed: column {columns[0]!r} of {path} holds {num_different} different whole numbers from "
            f"{different[0]:g} to {different[-1]:g}, which may be classes or numbers; set it to regression, "
            "ordinal or multiclass",
        )
    return "multiclass"
