"""Dice of label maps in validation, and means that skip undefined classes; `segmentation` has all metrics."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

ClassScores = dict[str, float | None]  # class name to value; None if undefined


class LabelValues(Protocol):
    """The foreground of label maps: the label values of each class or region, and the value to ignore.

    `targets/` implements it.
    """

    @property
    def ignore(self) -> int | None: ...

    @property
    def num_values(self) -> int: ...

    @property
    def by_name(self) -> Mapping[str, tuple[int, ...]]: ...


def dice(prediction: np.ndarray, reference: np.ndarray, targets: LabelValues) -> ClassScores:
    """Dice of each foreground class or region; voxels whose reference is `targets.ignore` do not count.

    A class in neither label map is undefined (None); a class in only one of them has 0.
    Shape: two label maps of the same shape.
    """
    if targets.ignore is not None:
        labelled = reference != targets.ignore
        prediction, reference = prediction[labelled], reference[labelled]
    size = 1 + int(max(targets.num_values, prediction.max(initial=0), reference.max(initial=0)))
    codes = (prediction.astype(np.int64) * size + reference).ravel()
    pairs = np.bincount(codes, minlength=size**2).reshape(size, size)
    row: ClassScores = {}
    for name, values in targets.by_name.items():
        total = pairs[list(values)].sum() + pairs[:, list(values)].sum()
        row[name] = float(2 * pairs[np.ix_(values, values)].sum() / total) if total else None
    return row


def mean_per_class(rows: Sequence[Mapping[str, float | None]]) -> ClassScores:
    """Mean of each class over the cases in which it is defined; None if there are none."""
    return {name: mean(dict(enumerate(row[name] for row in rows))) for name in (rows[0] if rows else ())}


def mean(row: Mapping[Any, float | None]) -> float | None:
    """Mean over the defined classes; None if there are none."""
    values = [value for value in row.values() if value is not None]
    return float(np.mean(values)) if values else None
