"""Words of tables and folders that mean something else than they spell: no value, or the same class again."""

import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable

from medconv.targets.base import finite_number

# What R, pandas, databases and spreadsheets write for no value, in small letters
_NO_VALUE = ("", "nan", "na", "n/a", "#n/a", "<na>", "none", "null", "nil")


def is_missing(cell: str, class_names: Collection[str] | None = None) -> bool:
    """Whether a cell holds no value: it is empty, or `NA`, `None` and the like in any case.

    Args:
        class_names: words that are values nevertheless, such as a class `none`; None: there are none.
    """
    return cell.lower() in _NO_VALUE and cell not in (class_names or ())


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


def spelling_error(names: Iterable[str]) -> str | None:
    """What is wrong if two names look like one class, such as `Benign` and `benign`; None: nothing.

    Args:
        names: that nobody has listed, as they are read from cells or folders.
    """
    by_spelling: defaultdict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        by_spelling[_spelling(name)].append(name)
    alike = [" and ".join(spellings) for spellings in by_spelling.values() if len(spellings) > 1]
    return f"classes that differ in their spelling alone: {', '.join(alike)}" if alike else None


def _spelling(name: str) -> str:
    """A form that two spellings of a name share; `1` and `1.0` are one."""
    number = finite_number(name)
    if number is not None:
        return str(number)
    words = unicodedata.normalize("NFKC", name).casefold().replace("_", " ").replace("-", " ")
    return " ".join(words.split())
