"""Dice of label maps in validation, and means that skip undefined classes; `segmentation` has all metrics."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

ClassScores = dict[str, float | None]  # class name to value; None if undefined
_VOXELS_AT_ONCE = 2**18  # their codes stay in the processor's cache


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
        is_labelled = reference != targets.ignore
        prediction = prediction[is_labelled]
        reference = reference[is_labelled]
    # Voxels with each pair of values: (predicted value, reference value) -> voxels. A prediction may hold
    # values that the targets do not declare.
    highest = max(targets.num_values, prediction.max(initial=0), reference.max(initial=0))
    size = 1 + int(highest)
    counts = np.zeros(size**2, np.int64)
    # 64-bit codes of a whole CT would take gigabytes
    for predicted_piece, reference_piece in zip(pieces(prediction), pieces(reference), strict=True):
        codes = predicted_piece.astype(np.int64) * size + reference_piece
        counts += np.bincount(codes, minlength=size**2)
    table = counts.reshape(size, size)
    scores: ClassScores = {}
    for name, values in targets.by_name.items():
        # a voxel of a region may have another of its values in the other map
        overlap = table[np.ix_(values, values)].sum()
        predicted_voxels = table[list(values)].sum()
        reference_voxels = table[:, list(values)].sum()
        total = predicted_voxels + reference_voxels
        scores[name] = float(2 * overlap / total) if total else None
    return scores


def mean_per_class(rows: Sequence[Mapping[str, float | None]]) -> ClassScores:
    """Mean of each class over the cases in which it is defined; None if there are none."""
    if not rows:
        return {}
    return {name: mean(row[name] for row in rows) for name in rows[0]}


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the defined values; None if there are none."""
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


def pieces(label: np.ndarray, order: Literal["C", "K"] = "C") -> list[np.ndarray]:
    """Voxels in a row, some at a time. Args: order: "K", as they lie in memory, which copies nothing."""
    voxels = label.ravel(order=order)
    return [voxels[first : first + _VOXELS_AT_ONCE] for first in range(0, len(voxels), _VOXELS_AT_ONCE)]


def value_counts(label: np.ndarray) -> np.ndarray:
    """Voxels of each value from 0 to the highest; sorting those of a CT, as `unique` does, takes long.

    Shape: any, integers from 0 on -> (values,) int64.
    """
    counts = np.zeros(1 + int(label.max(initial=0)), np.int64)
    for voxels in pieces(label, order="K"):
        counts += np.bincount(voxels, minlength=len(counts))
    return counts
