"""Files of points: JSON, CSV, and Slicer's `.mrk.json`; in mm, right, anterior, superior (RAS)."""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.datasets.common import read_json
from medconv.data.datasets.patterns import files_of, is_pattern
from medconv.utils.atomic_io import write_text
from medconv.utils.errors import ArgumentError

SLICER = ".mrk.json"
_SUFFIXES = (SLICER, ".json", ".csv")  # in a folder, the first that some file has
_SCHEMA = "https://raw.githubusercontent.com/slicer/slicer/master/Modules/Loadable/Markups/Resources/Schema/markups-schema-v1.0.3.json#"
_TO_RAS = {"RAS": np.ones(3), "LPS": np.array([-1.0, -1.0, 1.0])}
Points = dict[str, np.ndarray]  # name to (3,) mm


def point_files(path: str | Path, argument: str) -> dict[str, Path]:
    """Case id to its file, of a folder or a pattern.

    Raises: ArgumentError: as `pattern_of` and `files_of`.
    """
    is_folder = not is_pattern(path) and Path(path).is_dir()
    return files_of(Path(path) / pattern_of(Path(path), argument) if is_folder else path, argument)


def pattern_of(folder: Path, argument: str) -> str:
    """The pattern of the files in a folder. Raises: ArgumentError: there are none of these kinds."""
    for suffix in _SUFFIXES:
        if any(folder.glob(f"*{suffix}")):
            return f"{{id}}{suffix}"
    raise ArgumentError(argument, f" {folder}: no points there, expected files {', '.join(_SUFFIXES)}")


def read_points(path: Path) -> Points:
    """The points of a case.

    Raises:
        ValueError: unreadable, of another form, a position that is not three finite numbers, or one name
            twice.
    """
    points: Points = {}
    for name, position in _rows(path):
        if not isinstance(name, str) or not name.strip():
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


def _rows(path: Path) -> Iterable[tuple[Any, Any]]:
    """Names and positions (RAS) as they stand in a file."""
    if path.suffix == ".csv":
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                rows = list(csv.DictReader(file))
        except (OSError, ValueError, csv.Error) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        if rows and not {"name", "x", "y", "z"} <= rows[0].keys():
            raise ValueError(f"{path}: expected the columns name, x, y, z, in mm (RAS)")
        return [(row["name"], [row["x"], row["y"], row["z"]]) for row in rows]
    content = read_json(path)
    if isinstance(content, dict) and "markups" in content:
        return _of_slicer(path, content)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object such as {{'apex': [x, y, z]}}, in mm (RAS)")
    return content.items()


def _of_slicer(path: Path, content: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The points that a person has placed, of all lists in the file."""
    rows = []
    try:
        for markup in content["markups"]:
            # Slicer before 5 may write numbers: 0 is RAS, 1 LPS
            system = markup.get("coordinateSystem", "LPS")
            to_ras = _TO_RAS[{"0": "RAS", "1": "LPS"}.get(str(system), system)]
            scale = {"mm": 1.0}[markup.get("coordinateUnits", "mm")]
            for point in markup.get("controlPoints", []):
                if point.get("positionStatus", "defined") == "defined":
                    position = np.array(point["position"], float) * to_ras * scale
                    rows.append((point.get("label"), position.tolist()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: no markups as Slicer writes them, in LPS or RAS and mm ({error!r:.80})"
        ) from error
    return rows


def write_points(path: Path, points: Mapping[str, np.ndarray]) -> None:
    """As a list of fiducials for Slicer. Raises: OSError: the disk is full, or no permission."""
    rows = [
        {
            "id": str(number),
            "label": name,
            "position": [float(f"{mm:.4f}") for mm in position * _TO_RAS["LPS"]],
            "positionStatus": "defined",
        }
        for number, (name, position) in enumerate(points.items(), start=1)
    ]
    markup = {"type": "Fiducial", "coordinateSystem": "LPS", "coordinateUnits": "mm", "controlPoints": rows}
    write_text(path, json.dumps({"@schema": _SCHEMA, "markups": [markup]}, indent=1) + "\n")


def as_array(points: Mapping[str, np.ndarray], names: Iterable[str]) -> np.ndarray:
    """Shape: (names, 3) float64; NaN where a point is absent."""
    absent = np.full(3, np.nan)
    return np.stack([points.get(name, absent) for name in names])


def read_array(path: Path, names: Sequence[str]) -> np.ndarray:
    """As `as_array`. Raises: ValueError: as `read_points`, or a point of another name."""
    points = read_points(path)
    unknown = sorted(points.keys() - set(names))
    if unknown:
        raise ValueError(f"{path}: unknown point {unknown[0]}, expected {', '.join(names)}")
    return as_array(points, names)


def as_points(array: np.ndarray, names: Iterable[str]) -> Points:
    """The inverse of `as_array`."""
    return {name: row for name, row in zip(names, array, strict=True) if np.isfinite(row).all()}
