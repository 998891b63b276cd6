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
FOREGROUND = "*"  # stands for the whole foreground, in place of a class or region
_26_NEIGHBOURS = np.ones((3, 3, 3), bool)
_FACES = ndimage.generate_binary_structure(3, 1)
_KEYS = {"operation", "label", "min_mm3", "evidence"}


@dataclass(frozen=True)
class Step:
    """One operation on one class or region, or on the whole foreground.

    Args:
        operation: one of `OPERATIONS`. label: the class's or region's name, or `FOREGROUND`.
        min_mm3: of `remove_small`: smaller components go. In 2D: the area times the slice's thickness.
    """

    operation: str
    label: str
    min_mm3: float | None = None

    def __str__(self) -> str:
        return self.operation + (f" below {self.min_mm3:g} mm^3" if self.min_mm3 is not None else "")

    def plain(self) -> dict[str, Any]:
        """As a JSON file holds it."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_plain(cls, content: Any) -> Step:
        """From what `plain` gave. Raises: ValueError: anything else."""
        if not isinstance(content, Mapping) or not {"operation", "label"} <= set(content) <= _KEYS:
            what = "an object with the keys `operation`, `label` and perhaps `min_mm3`"
            raise ValueError(f"expected {what}, got {content!r:.200}")
        operation, label, volume = content["operation"], content["label"], content.get("min_mm3")
        if not isinstance(operation, str) or operation not in OPERATIONS:
            raise ValueError(f"`operation` must be one of {', '.join(OPERATIONS)}, got {operation!r:.80}")
        if not isinstance(label, str):
            raise ValueError(
                f"`label` must be the name of a class or region, or {FOREGROUND}, got {label!r:.80}"
            )
        if operation == "fill_holes" and label == FOREGROUND:
            raise ValueError(f"fill_holes needs the class or region that fills them, got {FOREGROUND}")
        if operation == "remove_small":
            if not (type(volume) in (int, float) and 0 < volume <= sys.float_info.max):  # type: ignore[operator]
                raise ValueError(f"`min_mm3` must be a positive number, got {volume!r:.80}")
        elif volume is not None:
            raise ValueError(f"`min_mm3` belongs to remove_small, not to {operation}")
        return cls(operation, label, None if volume is None else float(volume))

    def apply(self, label: np.ndarray, grid: Grid, targets: SegmentationTargets) -> np.ndarray:
        """As `Steps.apply`, for this step alone; `label` may be a crop of the grid with all foreground."""
        values = values_of(self.label, targets)
        box = bounding_box(np.isin(label, values))
        if box is None:
            return label
        operation = _filled if self.operation == "fill_holes" else _without_small
        changed = operation(part := label[box], self, values, grid, targets)
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
        if replace(self.targets, ignore=None) != replace(targets, ignore=None):
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

    Raises: ValueError: missing, damaged, or not such a file.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("steps"), list):
        raise ValueError(f"{path}: expected an object with a list `steps`, as find-postprocessing writes it")
    given = content.get("targets")
    needed = f"{path}: `targets` must give names, values and order of the classes, got {given!r:.200}"
    with explained(needed, ValueError):
        targets = SegmentationTargets.from_plain(given)
    steps = []
    for number, item in enumerate(content["steps"], 1):
        try:
            steps.append(Step.from_plain(item))
            values_of(steps[-1].label, targets)
        except ValueError as error:
            raise ValueError(f"{path}: step {number}: {error}") from error
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
    least = volumes.max() if step.min_mm3 is None else step.min_mm3 * (1 - 1e-6)  # affines are float32
    if not (volumes < least).any():
        return label
    removed = np.concatenate([[False], volumes < least])[components]
    result = label.copy()
    for value in values:
        regions = zip(targets.written, targets.values, strict=True)
        around = [writes for writes, own in regions if value in own and writes not in values]
        result[removed & (label == value)] = around[-1] if around else 0
    return result


def _filled(
    label: np.ndarray, step: Step, values: Sequence[int], grid: Grid, targets: SegmentationTargets
) -> np.ndarray:
    """A hole is a component of background all of whose neighbours belong to the class.

    For a region, voxels of the regions that contain it count as background, too, if filling takes them out of
    no region.
    """
    index = targets.names.index(step.label)
    value = targets.written[index]
    regions = [{name for name, own in targets.by_name.items() if v in own} for v in range(targets.num_values)]
    own = np.isin(label, values)
    fillable = np.isin(label, [v for v, names in enumerate(regions) if names < regions[value]]) & ~own
    holes, count = ndimage.label(fillable, _FACES)
    outer = ndimage.binary_dilation(~fillable & ~own, _FACES)
    # `label` is the box around the class, so what touches its border is not enclosed.
    for axis in (axis for axis in range(3) if grid.shape[axis] > 1):
        np.moveaxis(outer, axis, 0)[[0, -1]] = True
    enclosed = np.ones(count + 1, bool)
    enclosed[0] = False
    enclosed[np.unique(holes[outer])] = False
    return np.where(enclosed[holes], np.asarray(value, label.dtype), label) if enclosed.any() else label


def _components(mask: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """The number of each voxel's component, from 1, and the volumes of the components in mm^3."""
    components, _ = ndimage.label(mask, _26_NEIGHBOURS)
    return components, np.bincount(components.ravel())[1:] * grid.voxel_mm3


def values_of(name: str, targets: SegmentationTargets) -> tuple[int, ...]:
    """The label values of a class, a region or the whole foreground. Raises: ValueError: another name."""
    if name == FOREGROUND:
        return tuple(sorted({value for values in targets.values for value in values}))
    if name not in targets.names:
        names = ", ".join(targets.names)
        raise ValueError(f"`label` is {name!r:.80}, expected one of {names}, or {FOREGROUND}")
    return targets.by_name[name]
