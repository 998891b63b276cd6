"""Tables of cases: reading them, ids of their rows, and words that mean something else than they spell."""

import codecs
import csv
import logging
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from medconv.data.datasets.common import id_error, ids_of
from medconv.targets.base import finite_number
from medconv.utils.csv_cells import original

log = logging.getLogger(__name__)

PATH_COLUMN = "path"  # that has the image files, where no other one is named
# What R, pandas, databases and spreadsheets write for no value, in small letters
_NO_VALUE = ("", "nan", "na", "n/a", "#n/a", "<na>", "none", "null", "nil")


def is_missing(cell: str, class_names: Collection[str] | None = None) -> bool:
    """Whether a cell holds no value: it is empty, or `NA`, `None` and the like in any case.

    Args:
        class_names: words that are values nevertheless, such as a class `none`; None: there are none.
    """
    return cell.lower() in _NO_VALUE and cell not in (class_names or ())


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


def read_rows(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Column names, and each row, by column, with its line number.

    Raises:
        ValueError: no table, or no rows.
    """
    try:
        with path.open(newline="", encoding=_encoding(path)) as file:
            first_line = next((line for line in file if line.strip()), "")
            delimiter = _delimiter(first_line)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
            lines = []
            for row in reader:
                if any(row):
                    lines.append((reader.line_num, [original(cell.strip()) for cell in row]))
    except UnicodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8 or UTF-16 ({error})") from error
    except (OSError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read as a table ({error})") from error
    header = lines[0][1] if lines else []
    rows = lines[1:]
    duplicates = sorted({name for name in header if name and header.count(name) > 1})
    if duplicates:
        raise ValueError(f"{path}: column {duplicates[0]!r} is there twice")
    if not rows:
        raise ValueError(f"{path}: expected a row per image, found none")
    for line_number, row in rows:
        # without the empty cells that spreadsheets add to the end of a row
        last_filled = max((number for number, cell in enumerate(row, 1) if cell), default=0)
        if last_filled > len(header):
            raise ValueError(
                f"{path}, row {line_number}: {len(row)} cells, {len(header)} columns: {' | '.join(row)}; "
                f"a cell that holds {delimiter!r} must be in quotes"
            )
    column_names = [name for name in header if name]
    return column_names, [(line_number, _by_column(header, row)) for line_number, row in rows]


def _encoding(path: Path) -> str:
    """UTF-16 for Excel's "Unicode text", which begins with a byte order mark; else UTF-8."""
    with path.open("rb") as file:
        return "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _delimiter(header: str) -> str:
    """What follows `case` or `path` at the start; else the most frequent of these outside quotes."""
    first_column = re.match('"?(?:case|path)"?([,;\t])', header)
    if first_column:
        return first_column[1]
    unquoted = re.sub('"[^"]*"', "", header)
    return max(",;\t", key=unquoted.count)


def _by_column(header: Sequence[str], row: Sequence[str]) -> dict[str, str]:
    """Column to cell; missing ones are empty, and those of columns without a name are left out."""
    cells = zip_longest(header, row[: len(header)], fillvalue="")
    return {name: cell for name, cell in cells if name}


def path_column_of(header: Sequence[str], path_column: str) -> str | None:
    """The column of the image files: the one that training used, else `path`; None: a table has neither."""
    return next((name for name in (path_column, PATH_COLUMN) if name in header), None)


def row_ids(
    table: Path,
    header: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    path_column: str = PATH_COLUMN,
    used_columns: Sequence[str] = (),
) -> list[str]:
    """A case id for each row.

    It is the cell in the column `case`, or, if these cannot name files or are alike, the name of its image as
    by `ids_of`.

    Args:
        used_columns: columns that hold something else, such as labels, even if one is called `case`.

    Raises:
        ValueError: as `ids_of`.
    """
    if "case" in header and "case" not in used_columns:
        case_ids = [unicodedata.normalize("NFC", row["case"]) for row in rows]  # as `stem`
        are_valid = len(set(case_ids)) == len(case_ids) and not any(id_error(case) for case in case_ids)
        if are_valid or path_column not in header:
            return case_ids
        log.warning("%s: the column 'case' does not name each row; cases are named after their images", table)
    paths = [table.parent / row[path_column] for row in rows]
    return ids_of(paths, table.parent, table)


def case_of_row(row_id: str, cases: Collection[str]) -> str:
    """The case of a row, by its id of `row_ids`: without the number of a channel where only that is a case.

    A row by path may name the file of a first channel, as nnU-Net has it.
    """
    case_id = row_id.removesuffix("_0000")
    return case_id if row_id not in cases and case_id in cases else row_id
