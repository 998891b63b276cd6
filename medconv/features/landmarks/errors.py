"""How far points lie from their references."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from medconv.metrics.statistics import describe

NEAR_MM = 2.0
WORDS = {
    "mre": "mean radial error (mm)",
    "within_2mm": "share within 2 mm",
    "missed": "share missed",
    "wrong": "share found though absent",
}
Row = dict[str, list[Any]]  # by point: its error in mm or None, whether it is there, whether it was found


def row_of(positions: np.ndarray, found: np.ndarray, reference: np.ndarray, names: Sequence[str]) -> Row:
    """A case. An error is None where the reference lacks the point, or there is no position.

    Shape: positions, reference (names, 3) mm, NaN where absent; found (names,) bool.
    """
    distances = np.linalg.norm(positions - reference, axis=1).tolist()
    is_there = np.isfinite(reference).all(1)
    rows = zip(names, distances, is_there, found, strict=True)
    return {
        name: [mm if math.isfinite(mm) else None, int(there), int(seen)] for name, mm, there, seen in rows
    }


def told(row: Row) -> dict[str, Any]:
    """A row for people: `error_mm` of each point, and which are `missed` and `wrong`."""
    return {
        "error_mm": {name: mm for name, (mm, _, _) in row.items()},
        "missed": [name for name, (_, there, found) in row.items() if there and not found],
        "wrong": [name for name, (_, there, found) in row.items() if found and not there],
    }


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """The scores of `WORDS` over all points of all cases, and `mre_per_point`. None: undefined.

    A missed point is not within 2 mm.
    """
    points = [point for row in rows for point in row.values()]
    is_near = [bool(found) and mm <= NEAR_MM for mm, there, found in points if there]
    is_missed = [not found for _, there, found in points if there]
    is_wrong = [bool(found) for _, there, found in points if not there]
    names = rows[0] if rows else ()
    return {
        "mre": describe([mm for mm, _, _ in points])["mean"],
        "within_2mm": float(np.mean(is_near)) if is_near else None,
        "missed": float(np.mean(is_missed)) if is_missed else None,
        "wrong": float(np.mean(is_wrong)) if is_wrong else None,
        "mre_per_point": {name: describe([row[name][0] for row in rows])["mean"] for name in names},
    }
