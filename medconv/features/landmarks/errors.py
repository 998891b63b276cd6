"""How far points lie from their references."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from medconv.metrics.dice import mean

NEAR_MM = 2.0
WORDS = {
    "mre": "mean radial error (mm)",
    "within_2mm": "share within 2 mm",
    "missed": "share missed",
    "wrong": "share found though absent",
}
# By point: `error_mm` or None; whether it `is_there`, and whether `is_found`; in validation also its `height`
Row = dict[str, dict[str, Any]]


def row_of(positions: np.ndarray, found: np.ndarray, reference: np.ndarray, names: Sequence[str]) -> Row:
    """A case. An error is None where the reference lacks the point, or there is no position.

    Shape: positions, reference (names, 3) mm, NaN where absent; found (names,) bool.
    """
    distances = np.linalg.norm(positions - reference, axis=1).tolist()
    is_there = np.isfinite(reference).all(1).tolist()
    columns = zip(names, distances, is_there, found.tolist(), strict=True)
    return {
        name: {"error_mm": mm if math.isfinite(mm) else None, "is_there": there, "is_found": seen}
        for name, mm, there, seen in columns
    }


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """The scores of `WORDS` over all points of all cases, and `mre_per_point`. None: undefined.

    A missed point is not within 2 mm.
    """
    points = [point for row in rows for point in row.values()]
    there = [point for point in points if point["is_there"]]
    is_near = [point["is_found"] and point["error_mm"] <= NEAR_MM for point in there]
    is_wrong = [point["is_found"] for point in points if not point["is_there"]]
    names = rows[0] if rows else ()
    return {
        "mre": mean(point["error_mm"] for point in points),
        "within_2mm": float(np.mean(is_near)) if there else None,
        "missed": float(np.mean([not point["is_found"] for point in there])) if there else None,
        "wrong": float(np.mean(is_wrong)) if is_wrong else None,
        "mre_per_point": {name: mean(row[name]["error_mm"] for row in rows) for name in names},
    }


def cells_of(row: Row) -> dict[str, Any]:
    """Columns of a table of cases: the error of each point, and the names of missed and of wrong ones."""
    missed = [name for name, point in row.items() if point["is_there"] and not point["is_found"]]
    wrong = [name for name, point in row.items() if point["is_found"] and not point["is_there"]]
    errors = {f"error_mm/{name}": point["error_mm"] for name, point in row.items()}
    return {**errors, "missed_points": " ".join(missed), "wrong_points": " ".join(wrong)}
