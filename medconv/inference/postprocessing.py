"""Post-processing of label maps: remove components, fill holes; and the JSON file that lists the steps.

Components are connected through faces, edges and corners (26 neighbours, 8 in 2D), holes through faces only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

from medconv.data.case import Grid
from medconv.data.preprocessing.preprocess import content_box
from medconv.targets.segmentation import SegmentationTargets

FOREGROUND = "*"  # stands for the whole foreground, in place of a class or region
_26_NEIGHBOURS = np.ones((3, 3, 3), bool)
_FACES = ndimage.generate_binary_structure(3, 1)
_KEYS = {"operation", "label", "min_mm3", "evidence"}


@dataclass(frozen=True)
class Step:
    """One operation on one class or region, or on the whole foreground.

    Args:
        operation: a key of `OPERATIONS`.
        label: the class's or region's name, or `FOREGROUND`.
        min_mm3: for `remove_small`: smaller components are removed. In 2D it is the area times the slice's
            thickness.
    """

    operation: str
    label: str
    min_mm3: float | None = None

    def __str__(self) -> str:
        return self.operation + (f" below {self.min_mm3:g} mm^3" if self.min_mm3 is not None else "")

    def plain(self) -> dict[str, Any]:
        """As a JSON file holds it."""
        volume = {} if self.min_mm3 is None else {"min_mm3": self.min_mm3}
        return {"operation": self.operation, "label": self.label, **volume}

    @classmethod
    def from_plain(cls, content: Any) -> Step:
        """From what `plain` gave. Raises: ValueError: anything else."""
        if not isinstance(content, Mapping) or not {"operation", "label"} <= set(content) <= _KEYS:
            raise ValueError(
                "expected an object with the keys `operation`, `label` and perhaps `min_mm3`, got "
                f"{content!r:.200}"
            )
        operation, label, volume = content["operation"], content["label"], content.get("min_mm3")
        if not isinstance(operation, str) or operation not in OPERATIONS:
            raise ValueError(f"`operation` must be one of {', '.join(OPERATIONS)}, got {operation!r:.80}")
        if not isinstance(label, str):
            raise ValueError(
                f"`label` must be the name of a class or region, or {FOREGROUND}, got {label!r:.80}"
            )
        if operation == "fill_holes" and label == FOREGROUND:
            raise ValueError(f"fill_holes needs the class or region that fills them, got {FOREGROUND}")
        if operation != "remove_small":
            if volume is not None:
                raise ValueError(f"`min_mm3` belongs to remove_small, not to {operation}")
        elif (
            isinstance(volume, bool)
            or not isinstance(volume, (int, float))
            or not 0 < volume <= sys.float_info.max
        ):
            raise ValueError(f"`min_mm3` must be a positive number, got {volume!r:.80}")
        return cls(operation, label, None if volume is None else float(volume))

    def apply(self, label: np.ndarray, grid: Grid, targets: SegmentationTargets) -> np.ndarray:
        """As `Steps.apply`, for this step alone. `label` may be a crop of the grid that holds all
        foreground.
        """
        values = _values(self.label, targets)
        box = bounding_box(np.isin(label, values))
        if box is None:
            return label
        part = label[box]
        changed = OPERATIONS[self.operation](part, values, self, grid, targets)
        if changed is part:
            return label
        result = label.copy()
        result[box] = changed
        return result


@dataclass(frozen=True)
class Steps:
    """Steps, which are applied one after another.

    Args: targets: those that the steps were chosen for. source: the file, for messages.
    """

    steps: tuple[Step, ...]
    targets: SegmentationTargets
    source: Path | None = None

    def check(self, targets: SegmentationTargets) -> None:
        """Raises: ValueError: the steps were chosen for other classes."""
        if (self.targets.names, self.targets.values, self.targets.order) != (
            targets.names,
            targets.values,
            targets.order,
        ):
            name = self.source or "post-processing"
            raise ValueError(f"{name}: was made for {self.targets.words}; the network has {targets.words}")

    def apply(self, label: np.ndarray, grid: Grid, targets: SegmentationTargets) -> np.ndarray:
        """The label map after all steps; `label` is not changed.

        Shape: label (X, Y, Z); a 2D image has Z = 1.
        Raises: ValueError: the steps were chosen for other classes.
        """
        self.check(targets)
        for step in self.steps:
            label = step.apply(label, grid, targets)
        return label


def read(path: Path) -> Steps:
    """The steps of a file, which can name only known operations. Raises: ValueError: missing, damaged, or not
    such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("steps"), list):
        raise ValueError(
            f"{path}: expected a JSON object with a list `steps`, as medconv find-postprocessing writes it"
        )
    targets = _targets(content.get("targets"), path)
    steps = []
    for number, item in enumerate(content["steps"], 1):
        try:
            steps.append(Step.from_plain(item))
            _values(steps[-1].label, targets)
        except ValueError as error:
            raise ValueError(f"{path}: step {number}: {error}") from error
    return Steps(tuple(steps), targets, path)


def bounding_box(mask: np.ndarray) -> tuple[slice, ...] | None:
    """The smallest box that holds all true voxels; None: no voxel is true."""
    return content_box(mask[None]) if mask.any() else None


def component_volumes(mask: np.ndarray, grid: Grid) -> np.ndarray:
    """The volume of each component in mm^3. Shape: mask (X, Y, Z)."""
    return np.bincount(_components(mask).ravel())[1:] * grid.voxel_mm3


def _keep_largest(
    label: np.ndarray, values: Sequence[int], step: Step, grid: Grid, targets: SegmentationTargets
) -> np.ndarray:
    """If several components are largest, all are kept, so that the result is the same in any orientation."""
    components = _components(np.isin(label, values))
    sizes = np.bincount(components.ravel())[1:]
    return _without(label, components, sizes < sizes.max(), values, targets)


def _remove_small(
    label: np.ndarray, values: Sequence[int], step: Step, grid: Grid, targets: SegmentationTargets
) -> np.ndarray:
    assert step.min_mm3 is not None
    components = _components(np.isin(label, values))
    sizes = np.bincount(components.ravel())[1:] * grid.voxel_mm3
    smallest = step.min_mm3 * (1 - 1e-6)  # affines are float32
    return _without(label, components, sizes < smallest, values, targets)


def _fill_holes(
    label: np.ndarray, values: Sequence[int], step: Step, grid: Grid, targets: SegmentationTargets
) -> np.ndarray:
    """A hole is a component of background all of whose neighbours belong to the class.

    For a region, voxels of the regions that contain it count as background, too, if filling takes them out of
    no region.
    """
    value = _value(step.label, targets)
    regions = _names_of(value, targets)
    fillable = np.isin(
        label, [0, *(v for v in range(1, targets.num_values) if _names_of(v, targets) < regions)]
    )
    fillable &= ~np.isin(label, values)
    holes, count = ndimage.label(fillable, _FACES)
    outer = ndimage.binary_dilation(~fillable & ~np.isin(label, values), _FACES)
    # `label` is the box around the class, so what touches its border is not enclosed.
    for axis in (axis for axis in range(3) if grid.shape[axis] > 1):
        np.moveaxis(outer, axis, 0)[[0, -1]] = True
    enclosed = np.ones(count + 1, bool)
    enclosed[0] = False
    enclosed[np.unique(holes[outer])] = False
    return np.where(enclosed[holes], np.asarray(value, label.dtype), label) if enclosed.any() else label


# Takes the part of the label map inside the box around the class, and the class's label values.
Operation = Callable[[np.ndarray, Sequence[int], Step, Grid, SegmentationTargets], np.ndarray]
OPERATIONS: dict[str, Operation] = {
    "keep_largest": _keep_largest,
    "remove_small": _remove_small,
    "fill_holes": _fill_holes,
}


def _components(mask: np.ndarray) -> np.ndarray:
    components, _ = ndimage.label(mask, _26_NEIGHBOURS)
    return components


def _without(
    label: np.ndarray,
    components: np.ndarray,
    is_removed: np.ndarray,
    values: Sequence[int],
    targets: SegmentationTargets,
) -> np.ndarray:
    """Remove components, by a flag for each: their voxels become background, or the region around them."""
    if not is_removed.any():
        return label
    removed = np.concatenate([[False], is_removed])[components]
    result = label.copy()
    for value in values:
        result[removed & (label == value)] = _remaining(value, values, targets)
    return result


def _remaining(value: int, values: Sequence[int], targets: SegmentationTargets) -> int:
    """The new value of a voxel of `value` that no longer belongs to `values`."""
    others = (
        v
        for v, region_values in zip(targets.order, targets.values, strict=False)
        if value in region_values and v not in values
    )
    return max(others, key=targets.order.index, default=0)


def _names_of(value: int, targets: SegmentationTargets) -> set[str]:
    """The classes or regions that a label value belongs to."""
    return {name for name, values in targets.by_name.items() if value in values}


def _value(name: str, targets: SegmentationTargets) -> int:
    """The label value that a class or region writes."""
    index = targets.names.index(name)
    return targets.order[index] if targets.overlapping else targets.values[index][0]


def _values(name: str, targets: SegmentationTargets) -> tuple[int, ...]:
    """The label values of a class, a region or the whole foreground."""
    if name == FOREGROUND:
        return tuple(sorted({value for values in targets.values for value in values}))
    if name not in targets.names:
        raise ValueError(
            f"`label` is {name!r:.80}, expected one of {', '.join(targets.names)}, or {FOREGROUND}"
        )
    return targets.by_name[name]


def _targets(content: Any, path: Path) -> SegmentationTargets:
    try:
        return SegmentationTargets.from_plain(content)
    except ValueError as error:
        raise ValueError(
            f"{path}: `targets` must give names, values and order of the classes ({error}), got "
            f"{content!r:.200}"
        ) from error
