"""Label files that name their values (`.seg.nrrd`, DICOM SEG, NIfTI with a table of labels): matched by name.

Such files number their classes each in its own way: 3D Slicer in the order in which segments were drawn.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from medconv.data.io.images import label_names
from medconv.data.io.label_values import Relabel, relabel_of
from medconv.utils.logging import some

_NUM_FILES_READ = 20  # if none of these names its values, the others are not opened
_NUM_PROBLEMS = 10  # in a message
Names = Mapping[int, str]

log = logging.getLogger(__name__)


def names_of(files: Mapping[str, Path | None]) -> dict[str, Names]:
    """The names that each label file states, by case; empty: the first ones state none.

    Args: files: case to its label file; None: it has none.
    """
    present = {case: path for case, path in files.items() if path is not None}
    if not any(label_names(path) for path in islice(present.values(), _NUM_FILES_READ)):
        return {}
    return {case: label_names(path) for case, path in present.items()}


def class_names_of(names: Mapping[str, Names]) -> tuple[str, ...]:
    """The background and all names, in the order of the first file that has them; empty: there are none."""
    foreground: dict[str, str] = {}
    for of_file in names.values():
        for _, name in sorted(of_file.items()):
            foreground.setdefault(_key(name), name)
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
    values = {_key(name): value for value, name in enumerate(class_names) if value and name}
    unknown = {_key(name) for of_file in names.values() for name in of_file.values()} - set(values)
    if unknown and not any(_key(name) in values for of_file in names.values() for name in of_file.values()):
        _check_one_numbering(files, names, class_names)
        return {}
    problems: list[str] = []
    relabels: dict[str, Relabel] = {}
    for case, of_file in names.items():
        new_values: dict[int, int] = {0: 0} if ignore is None else {0: 0, ignore: ignore}
        for value, name in sorted(of_file.items()):
            if value == ignore:
                continue
            if _key(name) not in values:
                problems.append(f"{files[case]}: {value} is {name!r}, which is not a class")
            elif values[_key(name)] in new_values.values():
                problems.append(f"{files[case]}: {value} is {name!r}, and so is another value")
            else:
                new_values[value] = values[_key(name)]
        relabels[case] = tuple(sorted(new_values.items()))
    is_renumbered = any(value != new for relabel in relabels.values() for value, new in relabel)
    if is_renumbered:
        unnamed = [case for case, of_file in names.items() if not of_file]
        problems += [f"{files[case]}: states no names, and other files use other numbers" for case in unnamed]
    if problems:
        raise ValueError(_contradiction(problems, class_names))
    return relabels if is_renumbered else {}


def relabels(
    files: Mapping[str, Path], class_names: Sequence[str] | None, ignore: int | None = None
) -> dict[str, Relabel | None]:
    """How each of these label files is read: by name, or else as `relabel_of` has it.

    Args:
        files: case to its label file.
        class_names: by label value; None: not known.
        ignore: label value to ignore.

    Raises:
        ValueError: as `relabel_of` and `relabel_by_name`.
    """
    of_all = relabel_of(files.values(), None if class_names is None else len(class_names))
    names = names_of(files)
    by_name = relabel_by_name(files, names, class_names or (), ignore) if names else {}
    return {case: by_name.get(case, of_all) for case in files}


def _check_one_numbering(
    files: Mapping[str, Path | None], names: Mapping[str, Names], class_names: Sequence[str]
) -> None:
    """Files in other words than `class_names`, with a warning: values count if all files agree on them.

    Raises: ValueError: a name has two values, or a value has two names.
    """
    first_with_value: dict[int, tuple[str, str]] = {}  # to its case and the name there
    first_with_name: dict[str, tuple[str, int]] = {}
    problems = []
    for case, of_file in names.items():
        for value, name in sorted(of_file.items()):
            named_case, first_name = first_with_value.setdefault(value, (case, _key(name)))
            valued_case, first_value = first_with_name.setdefault(_key(name), (case, value))
            if first_name != _key(name) or first_value != value:
                other = files[named_case if first_name != _key(name) else valued_case]
                problems.append(f"{files[case]}: {value} is {name!r}, but not in {other}")
    if problems:
        raise ValueError(_contradiction(problems, class_names))
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


def _key(name: str) -> str:
    """A name as it is compared: without case, and `_` as a blank."""
    return " ".join(name.replace("_", " ").casefold().split())


def contradictions(path: Path, relabel: Relabel | None, class_names: Sequence[str]) -> list[str]:
    """Errors of a label file whose values have names of other classes than those that they are read as.

    Args:
        relabel: how the file is read, see `Case.relabel`.
        class_names: by label value.
    """
    values = {_key(name): value for value, name in enumerate(class_names)}
    new_values = None if relabel is None else dict(relabel)
    errors = []
    for value, name in sorted(label_names(path).items()):
        expected = values.get(_key(name))
        actual = value if new_values is None else new_values.get(value)
        if expected is not None and actual is not None and actual != expected:
            errors.append(
                f"{path}: its value {value} is {name!r}, but would be read as "
                f"{class_names[actual] if actual < len(class_names) else actual}"
            )
    return errors
