"""Tables that we write as CSV: a spreadsheet must not take a case id for a formula.

A text that begins with `=`, `+`, `-`, `@` or a tab, and is no number, gets an apostrophe in front, which
`original` removes when a table is read.
Source: OWASP, CSV injection.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Apostrophes of its own count, too, so that `original` gives back every text.
_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV, with texts that look like formulas escaped."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_escaped(cell) for cell in row] for row in rows)
    return text.getvalue()


def _escaped(cell: Any) -> Any:
    is_formula = isinstance(cell, str) and _FORMULA.match(cell) and not _is_number(cell)
    return f"'{cell}" if is_formula else cell


def original(cell: str) -> str:
    """The text that `csv_text` wrote as this cell."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
