"""Files of points: JSON, CSV, and Slicer's `.mrk.json`; in mm, right, anterior, superior (RAS).

A CSV file with a column `case` is a table of many cases.
"""

import csv
import json
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.datasets.common import read_json
from medconv.data.datasets.patterns import files_of, is_pattern
from medconv.data.io.manifest import MANIFEST
from medconv.utils.atomic_io import write_text
from medconv.utils.csv_cells import csv_text, original
from medconv.utils.errors import ArgumentError

SLICER = ".mrk.json"
SUFFIXES = (SLICER, ".json", ".csv")  # in a folder, the first that some file has
_COLUMNS = ("name", "x", "y", "z")
_SCHEMA = "https://raw.githubusercontent.com/slicer/slicer/master/Modules/Loadable/Markups/Resources/Schema/markups-schema-v1.0.3.json#"
_TO_RAS = {"RAS": np.ones(3), "LPS": np.array([-1.0, -1.0, 1.0])}
Points = dict[str, np.ndarray]  # name to (3,) mm
Rows = list[tuple[Any, Any]]  # names and positions (RAS) as they stand in a file


def point_files(path: str | Path, argument: str) -> dict[str, Path]:
    """Case id to its file, of a folder, a pattern or a table of all cases.

    Raises: ArgumentError: as `files_of`; or a folder without such files, or no table of cases.
    """
    path = Path(path)
    if path.is_dir():
        files = files_of(path / f"{{id}}{_suffix_in(path, argument)}", argument)
        return {case: file for case, file in files.items() if file.name != MANIFEST}
    if is_pattern(path) or not path.is_file():
        return files_of(path, argument)
    try:
        cases = _table(path, path.stat().st_mtime_ns)
    except ValueError as error:
        raise ArgumentError(argument, f": {error}") from error
    if None in cases:
        raise ArgumentError(argument, f"={path}: a table of all cases needs the column case")
    return dict.fromkeys(sorted(filter(None, cases)), path)


def suffix_of(path: Path) -> str:
    """The suffix of a file of points; of others that of Slicer's."""
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), SLICER)


def _suffix_in(folder: Path, argument: str) -> str:
    """Raises: ArgumentError: there are no files of these kinds."""
    for suffix in SUFFIXES:
        if any(file.name != MANIFEST for file in folder.glob(f"*{suffix}")):
            return suffix
    raise ArgumentError(argument, f" {folder}: no points there, expected files {', '.join(SUFFIXES)}")


def read_points(path: Path, case: str) -> Points:
    """The points of a case. Args: case: its id, for files with a column `case`.

    Raises:
        ValueError: unreadable, of another form, no row of the case, a position that is not three finite
            numbers, or one name twice.
    """
    points: Points = {}
    for name, position in _rows(path, case):
        name = name.strip() if isinstance(name, str) else ""
        if not name:
            raise ValueError(f"{path}: a point has no name")
        if name in points:
            raise ValueError(f"{path}: the point {name} is there twice")
        try:
            numbers = [float(number) for number in position]
        except (TypeError, ValueError):
            numbers = []
        if len(numbers) != 3 or not all(map(math.isfinite, numbers)):
            raise ValueError(f"{path}: {name} is at {position!r:.60}, expected three finite numbers in mm")
        points[name] = np.array(numbers)
    return points


def _rows(path: Path, case: str) -> Rows:
    if path.suffix == ".csv":
        cases = _table(path, path.stat().st_mtime_ns if path.is_file() else 0)
        if None in cases:
            return cases[None]
        if case not in cases:
            raise ValueError(f"{path}: no row of case {case}; a case without points has a row without a name")
        return cases[case]
    content = read_json(path)
    if isinstance(content, dict) and "markups" in content:
        return _of_slicer(path, content)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object such as {{'apex': [x, y, z]}}, in mm (RAS)")
    # Pairs, since a dict would lose a name that is there twice
    pairs: Rows = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=list)
    return pairs


@lru_cache(maxsize=4)
def _table(path: Path, modified: int) -> dict[str | None, Rows]:
    """The rows of each case of a CSV file; of None, if it has no column `case`.

    Args: modified: when; a table of all cases is read once, and again after it has changed.
    Raises: ValueError: unreadable, other columns, or a row with more cells, or without its case.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            numbered_rows = [(reader.line_num, row) for row in reader]
            columns = reader.fieldnames or ()
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    rows = [row for _, row in numbered_rows]
    if not set(_COLUMNS) <= set(columns):
        raise ValueError(f"{path}: expected the columns name, x, y, z, in mm (RAS), or these and case")
    for number, row in numbered_rows:
        if any(row.get(None) or ()):  # a decimal comma would make two numbers of one
            raise ValueError(f"{path}, row {number}: more cells than columns; decimals are written 1.5")
        if "case" in columns and not row["case"] and any(row[column] for column in _COLUMNS):
            raise ValueError(f"{path}, row {number}: the point {row['name']} has no case")
    if "case" not in columns:
        return {None: [(row["name"], [row["x"], row["y"], row["z"]]) for row in rows]}
    cases: dict[str | None, Rows] = {}
    for row in rows:
        case = cases.setdefault(unicodedata.normalize("NFC", original(row["case"] or "")), [])
        cells = [row[column] for column in _COLUMNS]
        if any(cells):  # else a case without points
            case.append((original(cells[0] or ""), cells[1:]))
    return cases


def _of_slicer(path: Path, content: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The points that a person has placed, of all lists in the file."""
    rows = []
    try:
        for markup in content["markups"]:
            # Slicer before 5 may write numbers: 0 is RAS, 1 LPS
            system = str(markup.get("coordinateSystem", "LPS")).upper()
            unit = markup.get("coordinateUnits", "mm")
            to_ras = _TO_RAS.get({"0": "RAS", "1": "LPS"}.get(system, system))
            if to_ras is None or unit != "mm":
                raise ValueError(f"coordinateSystem {system}, coordinateUnits {unit}")
            for point in markup.get("controlPoints", []):
                if point.get("positionStatus", "defined") == "defined":
                    position = np.array(point["position"], float) * to_ras
                    rows.append((point.get("label"), position.tolist()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: no markups as Slicer writes them, in LPS or RAS and mm ({error!s:.80})"
        ) from error
    return rows


def write_points(
    path: Path, points: Mapping[str, np.ndarray], case: str, heights: Mapping[str, float] | None = None
) -> None:
    """As a list of fiducials for Slicer, JSON or CSV, by the suffix; CSV has the case, so that files can be
    joined.

    Args: heights: of peaks, by name; JSON has no place for them.
    Raises: OSError: the disk is full, or no permission.
    """
    rounded = {name: [float(f"{mm:.4f}") for mm in position] for name, position in points.items()}
    heights = heights or {}
    suffix = suffix_of(path)
    if suffix == ".csv":
        rows = [[case, name, *position, _text(heights.get(name))] for name, position in rounded.items()]
        write_text(path, csv_text([["case", *_COLUMNS, "height"], *(rows or [[case, *[""] * 5]])]))
        return
    content: dict[str, Any] = rounded
    if suffix == SLICER:
        content = {"@schema": _SCHEMA, "markups": [_markup(rounded, heights)]}
    write_text(path, json.dumps(content, indent=1) + "\n")


def _text(height: float | None) -> str:
    return "" if height is None else f"{height:.3f}"


def _markup(points: Mapping[str, Sequence[float]], heights: Mapping[str, float]) -> dict[str, Any]:
    rows = [
        {
            "id": str(number),
            "label": name,
            "description": f"height {_text(heights[name])}" if name in heights else "",
            "position": (_TO_RAS["LPS"] * position).tolist(),
            "positionStatus": "defined",
        }
        for number, (name, position) in enumerate(points.items(), start=1)
    ]
    return {"type": "Fiducial", "coordinateSystem": "LPS", "coordinateUnits": "mm", "controlPoints": rows}


def as_array(points: Mapping[str, np.ndarray], names: Iterable[str]) -> np.ndarray:
    """Shape: (names, 3) float64; NaN where a point is absent."""
    absent = np.full(3, np.nan)
    return np.stack([points.get(name, absent) for name in names])


def read_array(path: Path, case: str, names: Sequence[str]) -> np.ndarray:
    """As `as_array`. Raises: ValueError: as `read_points`, or a point of another name."""
    points = read_points(path, case)
    unknown = sorted(points.keys() - set(names))
    if unknown:
        raise ValueError(f"{path}: unknown point {unknown[0]}, expected {', '.join(names)}")
    return as_array(points, names)


def as_points(array: np.ndarray, names: Iterable[str]) -> Points:
    """The inverse of `as_array`."""
    return {name: row for name, row in zip(names, array, strict=True) if np.isfinite(row).all()}
