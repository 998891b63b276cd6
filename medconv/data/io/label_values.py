"""What the values of label files mean: masks of 0 and one high value, such as 255, for one class; and
files that name their values (`.seg.nrrd`, DICOM SEG, NIfTI with a table of labels).

What a value means belongs to the dataset, not to a file: 0 and 128 in one mask, 0 and 255 in another may be
two classes, and 105 may be the class of that number. Files that name their values number their classes each
in its own way, such as 3D Slicer in the order in which segments were drawn, so they are matched by name.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from medconv.data.case import Relabel
from medconv.data.io.formats import shown
from medconv.data.io.images import label_names
from medconv.data.io.raster import MIN_SINGLE_VALUE, is_picture, read_mask
from medconv.utils.logging import some

_NUM_MASKS_READ = 20  # masks with foreground; those after them are checked when they are read
_NUM_FILES_READ = 20  # if none of these names its values, the others are not opened
_NUM_PROBLEMS = 10  # in a message
Names = Mapping[int, str]

log = logging.getLogger(__name__)


def relabel_of(masks: Iterable[Path | None], num_classes: int | None = None) -> Relabel | None:
    """How the masks of a dataset are read: 0 and 255, for example, as 0 and 1; None: as they are.

    Args:
        masks: label maps of any format; None where a case has none.
        num_classes: with the background; None: not known.

    Raises:
        ValueError: one mask holds 0 and one value of 100 or more, another holds other values.
    """
    if num_classes is not None and num_classes > 2:
        return None
    first_path: Path | None = None
    first_values: tuple[int, ...] = ()
    for path, values in islice(_foreground_values(masks), _NUM_MASKS_READ):
        if first_path is None:
            first_path = path
            first_values = values
        elif values != first_values and (_is_high(values) or _is_high(first_values)):
            raise ValueError(
                f"{first_path} holds {_text(first_values)}, {path} holds {_text(values)}: a value of "
                f"{MIN_SINGLE_VALUE} or more stands for the only class if every mask has just this and 0; "
                "expected one such value in all masks, or 0, 1, 2, ... for the classes of class_names"
            )
    return ((0, 0), (first_values[0], 1)) if _is_high(first_values) else None


def check_several_values(masks: Collection[Path | None], num_classes: int) -> None:
    """Raises: ValueError: masks of several classes all hold 0 and one undeclared value, such as 255."""
    read = list(islice(_foreground_values(masks), 1))
    if not read or not _is_high(read[0][1]) or read[0][1][0] < num_classes:
        return  # no further mask is read, as of most datasets
    read = list(islice(_foreground_values(masks), _NUM_MASKS_READ))
    if len({values for _, values in read}) == 1:
        path, values = read[0]
        raise ValueError(
            f"{path} and the other masks hold {_text(values)}: this is one class besides the background, "
            f"but class_names names {num_classes - 1}"
        )


def _foreground_values(masks: Iterable[Path | None]) -> Iterable[tuple[Path, tuple[int, ...]]]:
    """Pictures that hold values other than 0, and these values."""
    for path in masks:
        if path is None or not is_picture(path):
            continue
        try:
            values = np.unique(read_mask(path)).tolist()
        except ValueError:  # the check of the dataset reports it with its case
            continue
        foreground = tuple(int(value) for value in values if value != 0)
        if foreground:
            yield path, foreground


def _is_high(values: tuple[int, ...]) -> bool:
    return len(values) == 1 and values[0] >= MIN_SINGLE_VALUE


def _text(foreground: tuple[int, ...]) -> str:
    """Such as `0, 128`."""
    return ", ".join(map(str, (0, *foreground[:8])))


def names_of(files: Mapping[str, Path | None]) -> dict[str, Names]:
    """The names that each readable label file states, by case; empty: the first ones state none.

    Args: files: case to its label file; None: it has none.
    """
    present = {case: path for case, path in files.items() if path is not None}
    if not any(label_names(path) for path in islice(present.values(), _NUM_FILES_READ)):
        return {}
    found = {case: label_names(path) for case, path in present.items()}
    return {case: names for case, names in found.items() if names is not None}


def class_names_of(names: Mapping[str, Names]) -> tuple[str, ...]:
    """The background and all names, in the order of the first file that has them; empty: there are none."""
    foreground: dict[str, str] = {}
    for of_file in names.values():
        for _, name in sorted(of_file.items()):
            foreground.setdefault(comparable_name(name), name)
    return ("background", *foreground.values()) if foreground else ()


def relabel_by_name(
    files: Mapping[str, Path | None],
    names: Mapping[str, Names],
    class_names: Sequence[str],
    ignore: int | None = None,
) -> dict[str, Relabel]:
    """How the values of each file become those of their classes; empty: all are numbered as the classes.

    Args:
        files: case to its label file.
        names: of `names_of`.
        class_names: by label value.
        ignore: label value to ignore, which files do not name.

    Raises:
        ValueError: a name that is no class, two names of one class, or files without names beside others that
            are numbered otherwise; lists what contradicts.
    """
    values = {comparable_name(name): value for value, name in enumerate(class_names) if value and name}
    unknown = {comparable_name(name) for of_file in names.values() for name in of_file.values()} - set(values)
    if unknown and not any(
        comparable_name(name) in values for of_file in names.values() for name in of_file.values()
    ):
        check_one_numbering(files, names, class_names)
        _say_matched_by_number(names, class_names)
        return {}
    problems: list[str] = []
    relabels: dict[str, Relabel] = {}
    for case, of_file in names.items():
        new_values: dict[int, int] = {0: 0} if ignore is None else {0: 0, ignore: ignore}
        for value, name in sorted(of_file.items()):
            if value == ignore:
                continue
            if comparable_name(name) not in values:
                problems.append(f"{shown(str(files[case]))}: {value} is {name!r}, which is not a class")
            elif values[comparable_name(name)] in new_values.values():
                problems.append(f"{shown(str(files[case]))}: {value} is {name!r}, and so is another value")
            else:
                new_values[value] = values[comparable_name(name)]
        relabels[case] = tuple(sorted(new_values.items()))
    is_renumbered = any(value != new for relabel in relabels.values() for value, new in relabel)
    if is_renumbered:
        unnamed = [case for case, of_file in names.items() if not of_file]
        problems += [f"{files[case]}: states no names, and other files use other numbers" for case in unnamed]
    if problems:
        raise ValueError(_contradiction(problems, class_names))
    return relabels if is_renumbered else {}


def relabels(
    files: Mapping[str, Path],
    class_names: Sequence[str] | None,
    ignore: int | None = None,
    otherwise: Relabel | None = None,
) -> dict[str, Relabel | None]:
    """How each of these label files is read: by name, or else as `otherwise` or `relabel_of` has it.

    Args:
        files: case to its label file.
        class_names: by label value; None: not known.
        ignore: label value to ignore.
        otherwise: how files without names are read; None: not known.

    Raises:
        ValueError: as `relabel_of` and `relabel_by_name`.
    """
    of_all = otherwise or relabel_of(files.values(), None if class_names is None else len(class_names))
    names = names_of(files)
    by_name = relabel_by_name(files, names, class_names or (), ignore) if names else {}
    return {case: by_name.get(case, of_all) for case in files}


def check_one_numbering(
    files: Mapping[str, Path | None], names: Mapping[str, Names], class_names: Sequence[str]
) -> None:
    """All files agree on the names of their values, which need not be `class_names`.

    Raises: ValueError: a name has two values, or a value has two names.
    """
    first_with_value: dict[int, tuple[str, str]] = {}  # to its case and the name there
    first_with_name: dict[str, tuple[str, int]] = {}
    problems = []
    for case, of_file in names.items():
        for value, name in sorted(of_file.items()):
            named_case, first_name = first_with_value.setdefault(value, (case, comparable_name(name)))
            valued_case, first_value = first_with_name.setdefault(comparable_name(name), (case, value))
            if first_name != comparable_name(name) or first_value != value:
                other = files[named_case if first_name != comparable_name(name) else valued_case]
                problems.append(f"{files[case]}: {value} is {name!r}, but not in {other}")
    if problems:
        raise ValueError(_contradiction(problems, class_names))


def _say_matched_by_number(names: Mapping[str, Names], class_names: Sequence[str]) -> None:
    stated = next(of_file for of_file in names.values() if of_file)
    if any(class_names):
        log.warning(
            "label files name their values %s, none of which is among the classes %s; values are matched by "
            "number",
            some([f"{value}: {name}" for value, name in sorted(stated.items())]),
            some([f"{value}: {name}" for value, name in enumerate(class_names) if value and name]),
        )


def _contradiction(problems: Sequence[str], class_names: Sequence[str]) -> str:
    more = len(problems) - _NUM_PROBLEMS
    lines = [*problems[:_NUM_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
    return (
        f"names in label files contradict each other, or the classes ({some(list(class_names[1:]))}); "
        "expected the same names in all, or files without names\n  " + "\n  ".join(lines)
    )


def comparable_name(name: str) -> str:
    """A name as it is compared: without case, and `_` as a blank."""
    return " ".join(name.replace("_", " ").casefold().split())


def contradictions(
    path: Path, relabel: Relabel | None, class_names: Sequence[str], annotated: Sequence[int] | None
) -> list[str]:
    """Errors of a label file whose values have names of other classes than those that they are read as.

    Args:
        relabel: how the file is read, see `Case.relabel`.
        class_names: by label value.
        annotated: the values that the case has examples of, as `Case.annotated`; other names are not its own.
    """
    values = {
        comparable_name(name): value
        for value, name in enumerate(class_names)
        if annotated is None or not value or value in annotated
    }
    new_values = None if relabel is None else dict(relabel)
    errors = []
    for value, name in sorted((label_names(path) or {}).items()):
        expected = values.get(comparable_name(name))
        actual = value if new_values is None else new_values.get(value)
        if expected is not None and actual is not None and actual != expected:
            errors.append(
                f"{path}: its value {value} is {name!r}, but would be read as "
                f"{class_names[actual] if actual < len(class_names) else actual}"
            )
    return errors
