"""Lists of cases to predict: text, JSON and tables."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medconv.data.datasets.tables import read_rows, row_ids
from medconv.utils.errors import explained


@dataclass(frozen=True)
class Source:
    """Where the cases come from; in messages `name path`."""

    path: Path
    name: str

    def __str__(self) -> str:
        return f"{self.name} {self.path}"


@dataclass(frozen=True)
class Entry:
    """A case of a list. Args: case_id: None: by the name of its first file. paths: None: missing channels."""

    case_id: str | None
    paths: tuple[str | None, ...]


def read_text_list(source: Source) -> list[Entry]:
    entries: list[Entry] = []
    for line in _text(source).splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            entries.append(Entry(None, tuple(line.split("\t"))))
    return entries


def read_table(source: Source, answers: Sequence[str]) -> list[Entry]:
    """A row for each image, as `data=csv` reads them."""
    header, numbered_rows = read_rows(source.path)
    if "path" not in header:
        raise ValueError(f"{source}: no column 'path', it has {', '.join(header)}")
    for number, row in numbered_rows:
        if not row["path"]:
            raise ValueError(f"{source}, row {number}: column 'path' is empty, expected an image file")
    rows = [row for _, row in numbered_rows]
    case_ids = row_ids(source.path, header, rows, used_columns=answers)
    return [Entry(case_id, (row["path"],)) for case_id, row in zip(case_ids, rows, strict=True)]


def read_json(source: Source) -> list[Entry]:
    text = _text(source)
    with explained(f"{source}: not JSON", ValueError, RecursionError):
        # Tuples of pairs, since a dict would lose a key that occurs twice.
        content = json.loads(text, object_pairs_hook=tuple)
    if isinstance(content, list):
        return [Entry(None, _paths(item, source)) for item in content]
    if isinstance(content, tuple):
        return [Entry(case_id, _paths(item, source)) for case_id, item in content]
    raise ValueError(f"{source}: expected an array of cases, or an object of case id to files")


def _paths(item: Any, source: Source) -> tuple[str | None, ...]:
    paths = [item] if isinstance(item, str) else item
    is_list = isinstance(paths, list) and any(paths)
    if not is_list or not all(path is None or (isinstance(path, str) and path) for path in paths):
        raise ValueError(
            f"{source}: a case is a path, or an array of paths, one per channel; got {item!r:.80}"
        )
    return tuple(paths)


def _text(source: Source) -> str:
    with explained(f"{source}: cannot be read as text", OSError, UnicodeDecodeError):
        return source.path.read_text(encoding="utf-8-sig")
