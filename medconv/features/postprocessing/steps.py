"""Post-processing of label maps: remove components, fill holes; and the JSON file that lists the steps.

Components are connected through faces, edges and corners (26 neighbours, 8 in 2D), holes through faces only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

from medconv.data.case import Grid
from medconv.data.datasets.common import read_json
from medconv.data.preprocessing.preprocess import content_box
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import explained

OPERATIONS = ("keep_largest", "remove_small", "fill_holes")
# Stands for all classes together, in place of a class or region.
FOREGROUND = "*"
_26_NEIGHBOURS = np.ones((3, 3, 3), bool)
_FACES = ndimage.generate_binary_structure(3, 1)
_KEYS = {"operation", "label", "min_mm3", "evidence"}


@dataclass(frozen=True)
class Step:
    """One operation on one class or region, or on the whole foreground.

    Args:
        operation: one of `OPERATIONS`.
        label: the class's or region's name, or `FOREGROUND`.
        min_mm3: of `remove_small`: smaller components go. In 2D: the area times the slice's thickness.
    """

    operation: str
    label: str
    min_mm3: float | None = None

    def __str__(self) -> str:
        if self.min_mm3 is None:
            return self.operation
        return f"{self.operation} below {self.min_mm3:g} mm^3"

    def plain(self) -> dict[str, Any]:
        """As a JSON file holds it."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_plain(cls, content: Any) -> Step:
        """From what `plain` gave. Raises: ValueError: anything else."""
        if not isinstance(content, Mapping) or not {"operation", "label"} <= set(content) <= _KEYS:
            raise ValueError(
                "expected an object with the keys `operation`, `label` and perhaps `min_mm3`, got "
                f"{content!r:.200}"
            )
        operation = content["operation"]
        label = content["label"]
        volume = content.get("min_mm3")
        if not isinstance(operation, str) or operation not in OPERATIONS:
            raise ValueError(f"`operation` must be one of {', '.join(OPERATIONS)}, got {operation!r:.80}")
        if not isinstance(label, str):
            raise ValueError(
                f"`label` must be the name of a class or region, or {FOREGROUND}, got {label!r:.80}"
            )
        if operation == "fill_holes" and label == FOREGROUND:
            raise ValueError(f"fill_holes needs the class or region that fills them, got {FOREGROUND}")
        if operation == "remove_small":
            return cls(operation, label, _positive(volume))
        if volume is not None:
            raise ValueError(f"`min_mm3` belongs to remove_small, not to {operation}")
        return cls(operation, label)

    def apply(self, label: np.ndarray, grid: Grid, targets: SegmentationTargets) -> np.ndarray:
        """As `Steps.apply`, for this step alone; `label` may be a crop of the grid with all foreground."""
        values = values_of(self.label, targets)
        box = bounding_box(np.isin(label, values))
        if box is None:
            return label
        content = label[box]
        if self.operation == "fill_holes":
            changed = _filled(content, self, values, grid, targets)
        else:
            changed = _without_small(content, self, values, grid, targets)
        if changed is content:
            return label
        result = label.copy()
        result[box] = changed
        return result


def _positive(volume: Any) -> float:
    # Not `isinstance`, for which a bool is an int.
    is_number = type(volume) in (int, float)
    if not (is_number and 0 < volume <= sys.float_info.max):
        raise ValueError(f"`min_mm3` must be a positive number, got {volume!r:.80}")
    return float(volume)


@dataclass(frozen=True)
class Steps:
    """Steps, which are applied one after another.

    Args:
        steps: in order.
        targets: those that the steps were chosen for.
        source: the file, for messages.
    """

    steps: tuple[Step, ...]
    targets: SegmentationTargets
    source: Path | None = None

    def check(self, targets: SegmentationTargets) -> None:
        """Raises: ValueError: the steps were chosen for other classes."""
        if replace(self.targets.of_answers, ignore=None) != replace(targets.of_answers, ignore=None):
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
    """The steps of a file, which can name only known operations.

    Raises:
        ValueError: missing, damaged, or not such a file.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("steps"), list):
        raise ValueError(f"{path}: expected an object with a list `steps`, as find-postprocessing writes it")
    plain_targets = content.get("targets")
    needed = f"{path}: `targets` must give names, values and order of the classes, got {plain_targets!r:.200}"
    with explained(needed, ValueError):
        targets = SegmentationTargets.from_plain(plain_targets)
    steps: list[Step] = []
    for number, item in enumerate(content["steps"], 1):
        try:
            step = Step.from_plain(item)
            values_of(step.label, targets)
        except ValueError as error:
            raise ValueError(f"{path}: step {number}: {error}") from error
        steps.append(step)
    return Steps(tuple(steps), targets, path)


def bounding_box(mask: np.ndarray) -> tuple[slice, ...] | None:
    """The smallest box that holds all true voxels; None: no voxel is true."""
    return content_box(mask[None]) if mask.any() else None


def component_volumes(mask: np.ndarray, grid: Grid) -> np.ndarray:
    """The volume of each component in mm^3. Shape: mask (X, Y, Z)."""
    return _components(mask, grid)[1]


def _without_small(
    label: np.ndarray, step: Step, values: Sequence[int], grid: Grid, targets: SegmentationTargets
) -> np.ndarray:
    """Voxels of the removed components become background, or the region around them.

    If several components are largest, all are kept, so that the result is the same in any orientation.
    """
    components, volumes = _components(np.isin(label, values), grid)
    # Volumes come from affines, which are float32.
    smallest_kept = volumes.max() if step.min_mm3 is None else step.min_mm3 * (1 - 1e-6)
    is_small = volumes < smallest_kept
    if not is_small.any():
        return label
    # Component 0 is the background.
    removed = np.concatenate([[False], is_small])[components]
    result = label.copy()
    for value in values:
        surrounding = [
            written
            for written, region_values in zip(targets.written, targets.values, strict=True)
            if value in region_values and written not in values
        ]
        # The last one is drawn over the others.
        result[removed & (label == value)] = surrounding[-1] if surrounding else 0
    return result


def _filled(
    label: np.ndarray, step: Step, values: Sequence[int], grid: Grid, targets: SegmentationTargets
) -> np.ndarray:
    """A hole is a component of background all of whose neighbours belong to the class.

    For a region, voxels of the regions that contain it count as background, too, if filling takes them out of
    no region.
    """
    fill_value = targets.written[targets.names.index(step.label)]
    foreground = np.isin(label, values)
    fillable = np.isin(label, _contained_values(fill_value, targets)) & ~foreground
    holes, num_holes = ndimage.label(fillable, _FACES)
    outside = ndimage.binary_dilation(~fillable & ~foreground, _FACES)
    # `label` is the box around the class, so what touches its border is not enclosed.
    for axis in range(3):
        if grid.shape[axis] > 1:
            np.moveaxis(outside, axis, 0)[[0, -1]] = True
    is_enclosed = np.ones(num_holes + 1, bool)
    # Voxels that are not fillable.
    is_enclosed[0] = False
    is_enclosed[np.unique(holes[outside])] = False
    if not is_enclosed.any():
        return label
    return np.where(is_enclosed[holes], np.asarray(fill_value, label.dtype), label)


def _contained_values(fill_value: int, targets: SegmentationTargets) -> list[int]:
    """Label values whose regions, none for the background, are some of those of `fill_value`."""
    regions_of = [
        {name for name, region_values in targets.by_name.items() if value in region_values}
        for value in range(targets.num_values)
    ]
    return [value for value, regions in enumerate(regions_of) if regions < regions_of[fill_value]]


def _components(mask: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """The number of each voxel's component, from 1, and the volumes of the components in mm^3."""
    components, _ = ndimage.label(mask, _26_NEIGHBOURS)
    # Without the background.
    voxel_counts = np.bincount(components.ravel())[1:]
    return components, voxel_counts * grid.voxel_mm3


def values_of(name: str, targets: SegmentationTargets) -> tuple[int, ...]:
    """The label values of a class, a region or the whole foreground. Raises: ValueError: another name."""
    if name == FOREGROUND:
        return tuple(sorted({value for values in targets.values for value in values}))
    if name not in targets.names:
        names = ", ".join(targets.names)
        raise ValueError(f"`label` is {name!r:.80}, expected one of {names}, or {FOREGROUND}")
    return targets.by_name[name]
