"""Dice of label maps, per case and over cases; the same functions in validation and in `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Row = dict[str, float | None]  # class name to value; None where undefined


def dice(prediction: np.ndarray, reference: np.ndarray, class_names: Sequence[str]) -> Row:
    """Dice of each foreground class.

    Shape: two label maps of the same shape. A class that neither holds is undefined (None); one that only one of them
    holds is 0.
    """
    size = len(class_names)
    both = np.bincount(reference[prediction == reference].ravel(), minlength=size)
    total = np.bincount(prediction.ravel(), minlength=size) + np.bincount(reference.ravel(), minlength=size)
    return {
        name: float(2 * both[value] / total[value]) if total[value] else None
        for value, name in enumerate(class_names)
        if value > 0
    }


def mean_per_class(rows: Sequence[Mapping[str, float | None]]) -> Row:
    """Mean over the cases in which a class is defined; None if it is in no case."""
    names = list(rows[0]) if rows else []
    defined = {name: [row[name] for row in rows if row[name] is not None] for name in names}
    return {name: float(np.mean(values)) if values else None for name, values in defined.items()}  # type: ignore[arg-type]


def mean(row: Mapping[str, float | None]) -> float | None:
    """Mean over classes, of those that are defined."""
    values = [value for value in row.values() if value is not None]
    return float(np.mean(values)) if values else None
