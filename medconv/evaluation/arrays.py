"""Label maps in memory against references: the metrics of each case, as `segmentation` has them for files."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np

from medconv.data.case import Grid
from medconv.evaluation import labels, segmentation_results
from medconv.evaluation.segmentation_results import CaseRow
from medconv.metrics.segmentation import MetricSelection, measure
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import ArgumentError

# Case to label map, (X, Y, Z) or (X, Y).
Arrays = Mapping[str, np.ndarray]
# Of all cases, or by case.
Spacing = Sequence[float] | Mapping[str, Sequence[float]]


def evaluate(
    predictions: Arrays,
    references: Arrays,
    spacing_mm: Spacing,
    targets: SegmentationTargets | Sequence[str] | None = None,
    tolerance_mm: Mapping[str | None, float] | None = None,
    selection: MetricSelection | None = None,
) -> dict[str, Any]:
    """Measure each prediction against the reference of the same case.

    Shape: two integer label maps (X, Y, Z) or (X, Y) of each case.

    Args:
        references: case to label map; further cases are left out.
        spacing_mm: of the axes, in mm; for all cases, or by case.
        targets: what the label values mean: a model's `targets`, or names of the classes from label value 0,
            the background, on; None: each value is a class.
        tolerance_mm: of the surface Dice, by class; None stands for all other classes.
        selection: further metrics; None: none.
    Returns:
        `mean`, `per_class`, `statistics` and `cases`, as `segmentation.evaluate` has them.
    Raises:
        ValueError: no case, a case without a reference or spacing, or label maps that do not fit each other;
            names the case.
    """
    if not predictions:
        raise ArgumentError("predictions", " has no case")
    pairs = {
        case: (
            _label_map(array, f"prediction of case {case}"),
            _label_map(_of_case(references, case, "references"), f"reference of case {case}"),
        )
        for case, array in predictions.items()
    }
    targets = _targets(targets, pairs)
    by_class = tolerance_mm or {}
    labels.check_tolerances(by_class, targets.names)
    tolerances = labels.tolerance_of(by_class, targets.names)
    rows: list[CaseRow] = []
    for case, pair in pairs.items():
        prediction, reference = _fitting(case, *pair, targets)
        grid = _grid(reference.shape, np.ndim(predictions[case]), spacing_mm, case)
        scores = measure(prediction, reference, grid, targets, tolerances, selection)
        rows.append({"case": case, **scores})
    return segmentation_results.described(rows, targets.names, selection or MetricSelection())


def by_case(arrays: np.ndarray | Sequence[np.ndarray] | Arrays, argument: str) -> Arrays:
    """Case to label map; without names, the cases are numbered from 0. One array is one case.

    Raises: ValueError: what is no array, such as an image of nibabel; names the argument.
    """
    named: Arrays
    if isinstance(arrays, Mapping):
        named = arrays
    elif isinstance(arrays, Iterable) and not hasattr(arrays, "__array__"):
        named = {str(number): array for number, array in enumerate(arrays)}
    else:
        named = {"0": cast(np.ndarray, arrays)}
    for case, array in named.items():
        if np.asarray(array).dtype == object:
            raise ArgumentError(
                argument,
                f": case {case} must be an array, got {type(array).__name__}; "
                "of an image of nibabel, np.asarray(image.dataobj)",
            )
    return named


def _targets(
    targets: SegmentationTargets | Sequence[str] | None, pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> SegmentationTargets:
    if isinstance(targets, SegmentationTargets):
        if not targets.answers_classes:
            raise ArgumentError(
                "targets", f": arrays are scored by classes, these are {targets.kind}; give files"
            )
        return targets
    if isinstance(targets, (str, Mapping)):
        raise ArgumentError("targets", f" must be a list of names, from the background on, got {targets!r}")
    if targets is not None:
        return LabelMapTargets.of_classes(targets)
    values: set[int] = set()
    for label_map in chain.from_iterable(pairs.values()):
        values.update(np.unique(label_map).tolist())
    return labels.numbered(values)


def _of_case(values: Mapping[str, Any], case: str, argument: str) -> Any:
    if case not in values:
        raise ArgumentError(argument, f": case {case} is missing; there are {', '.join(values)}")
    return values[case]


def _fitting(
    case: str, prediction: np.ndarray, reference: np.ndarray, targets: SegmentationTargets
) -> tuple[np.ndarray, np.ndarray]:
    """Prediction and reference of a case, (X, Y, Z). Raises: ValueError: they do not fit each other."""
    if prediction.shape != reference.shape:
        raise ValueError(
            f"case {case}: the prediction has shape {prediction.shape}, its reference {reference.shape}"
        )
    reference = targets.one_ignored(reference)
    labels.check_declared(f"prediction of case {case}", prediction, targets)
    # Only a reference may hold the value to ignore.
    labels.check_declared(f"reference of case {case}", reference, targets, targets.ignore)
    return prediction, reference


def _label_map(array: np.ndarray, name: str) -> np.ndarray:
    """Shape: (X, Y, Z) or (X, Y) -> (X, Y, Z), as files of label maps have."""
    array = np.asarray(array)
    if array.ndim not in (2, 3) or array.size == 0:
        raise ValueError(f"{name}: expected shape (X, Y, Z) or (X, Y), got {array.shape}")
    if array.dtype.kind not in "iub":
        raise ValueError(
            f"{name}: expected label values that are integers, got {array.dtype}; "
            "array.astype(int) converts whole numbers"
        )
    if array.min() < 0:
        raise ValueError(f"{name}: expected label values of 0 or more, got {array.min()}")
    if array.ndim == 2:
        array = array[..., None]
    return array.astype(np.int64) if array.dtype.kind == "b" else array


def _grid(shape: Sequence[int], num_axes: int, spacing_mm: Spacing, case: str) -> Grid:
    """The grid of a label map, whose axes point right, anterior and superior."""
    if isinstance(spacing_mm, Mapping):
        spacing_mm = _of_case(spacing_mm, case, "spacing_mm")
    spacing = [float(mm) for mm in spacing_mm]
    if len(spacing) != num_axes or not all(0 < mm < np.inf for mm in spacing):
        raise ArgumentError(
            "spacing_mm", f" must be {num_axes} positive numbers for case {case}, got {spacing}"
        )
    # The thickness of a 2D image is not known.
    across = [1.0] * (3 - num_axes)
    return Grid.of(shape, np.diag([*spacing, *across, 1.0]))
