"""Post-processing of label maps: which components stay, which holes are filled; and the file that says which
steps to take.

Components are connected through faces, edges and corners (26 neighbours, 8 in 2D); holes, their counterpart,
through faces.
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

WHOLE = "*"  # stands for the whole foreground, in the place of a class or region
_AROUND = np.ones((3, 3, 3), bool)
_FACES = ndimage.generate_binary_structure(3, 1)
_KEYS = {"operation", "of", "min_mm3", "evidence"}


@dataclass(frozen=True)
class Step:
    """One operation on one class or region, or on the whole foreground.

    Args:
        operation: a key of `OPERATIONS`.
        of: the class's or region's name, or `WHOLE`.
        min_mm3: of `remove_small`: components of a smaller volume go. In 2D it is the area times the slice's
            thickness.
    """

    operation: str
    of: str
    min_mm3: float | None = None

    def __str__(self) -> str:
        return self.operation + (f" below {self.min_mm3:g} mm^3" if self.min_mm3 is not None else "")

    def plain(self) -> dict[str, Any]:
        """As the file holds it."""
        volume = {} if self.min_mm3 is None else {"min_mm3": self.min_mm3}
        return {"operation": self.operation, "of": self.of, **volume}

    @classmethod
    def from_plain(cls, content: Any) -> Step:
        """From what `plain` gave. Raises: ValueError: anything else."""
        if not isinstance(content, Mapping) or not {"operation", "of"} <= set(content) <= _KEYS:
            raise ValueError(
                "expected an object with the keys `operation`, `of` and perhaps `min_mm3`, got "
                f"{content!r:.200}"
            )
        operation, of, volume = content["operation"], content["of"], content.get("min_mm3")
        if not isinstance(operation, str) or operation not in OPERATIONS:
            raise ValueError(f"`operation` must be one of {', '.join(OPERATIONS)}, got {operation!r:.80}")
        if not isinstance(of, str):
            raise ValueError(f"`of` must be the name of a class or region, or {WHOLE}, got {of!r:.80}")
        if operation == "fill_holes" and of == WHOLE:
            raise ValueError(f"fill_holes needs the class or region that fills them, got {WHOLE}")
        if operation != "remove_small":
            if volume is not None:
                raise ValueError(f"`min_mm3` belongs to remove_small, not to {operation}")
        elif (
            isinstance(volume, bool)
            or not isinstance(volume, (int, float))
            or not 0 < volume <= sys.float_info.max
        ):
            raise ValueError(f"`min_mm3` must be a positive number, got {volume!r:.80}")
        return cls(operation, of, None if volume is None else float(volume))

    def apply(self, label: np.ndarray, grid: Grid, targets: SegmentationTargets) -> np.ndarray:
        """As `Steps.apply`, for this step alone. `label` may be a part of the grid that holds all of the
        foreground.
        """
        values = _values(self.of, targets)
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
    """Steps, to be taken one after another.

    Args: targets: what they were decided for. source: the file, for messages.
    """

    steps: tuple[Step, ...]
    targets: SegmentationTargets
    source: Path | None = None

    def check(self, targets: SegmentationTargets) -> None:
        """Raises: ValueError: they were decided for other classes than these."""
        if (self.targets.names, self.targets.values, self.targets.order) != (
            targets.names,
            targets.values,
            targets.order,
        ):
            name = self.source or "post-processing"
            raise ValueError(f"{name}: was decided for {self.targets.words}; the network has {targets.words}")

    def apply(self, label: np.ndarray, grid: Grid, targets: SegmentationTargets) -> np.ndarray:
        """The label map after all steps; the one given is left as it is.

        Shape: label (X, Y, Z); a 2D image has Z = 1.
        Raises: ValueError: the steps were decided for other classes.
        """
        self.check(targets)
        for step in self.steps:
            label = step.apply(label, grid, targets)
        return label


def read(path: Path) -> Steps:
    """The steps that a file holds; nothing in it chooses code. Raises: ValueError: missing, damaged, or
    not such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("steps"), list):
        raise ValueError(
            f"{path}: expected a JSON object whose `steps` is a list, as medconv find-postprocessing writes "
            "it"
        )
    targets = _targets(content.get("targets"), path)
    steps = []
    for number, item in enumerate(content["steps"], 1):
        try:
            steps.append(Step.from_plain(item))
            _values(steps[-1].of, targets)
        except ValueError as error:
            raise ValueError(f"{path}: step {number}: {error}") from error
    return Steps(tuple(steps), targets, path)


def bounding_box(mask: np.ndarray) -> tuple[slice, ...] | None:
    """The smallest box that holds all true voxels; None: there is none."""
    return content_box(mask[None]) if mask.any() else None


def component_volumes(mask: np.ndarray, grid: Grid) -> np.ndarray:
    """The volume of each component in mm^3. Shape: mask (X, Y, Z)."""
    return np.bincount(_components(mask).ravel())[1:] * grid.voxel_mm3


def _keep_largest(
    label: np.ndarray, values: Sequence[int], step: Step, grid: Grid, targets: SegmentationTargets
) -> np.ndarray:
    """Of components equally large all stay, so that no orientation of the array matters."""
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
    """A hole is of background, encloses nothing else, and every neighbour of it belongs to the class.

    Of a region, voxels of regions around it count as background: those that lose nothing by becoming part of
    it.
    """
    value = _value(step.of, targets)
    kept = _holding(value, targets)
    fillable = np.isin(label, [0, *(v for v in range(1, targets.num_values) if _holding(v, targets) < kept)])
    fillable &= ~np.isin(label, values)
    holes, count = ndimage.label(fillable, _FACES)
    outer = ndimage.binary_dilation(~fillable & ~np.isin(label, values), _FACES)
    for axis in (
        axis for axis in range(3) if grid.shape[axis] > 1
    ):  # what lies outside of the box is none of the class
        np.moveaxis(outer, axis, 0)[[0, -1]] = True
    enclosed = np.ones(count + 1, bool)
    enclosed[0] = False
    enclosed[np.unique(holes[outer])] = False
    return np.where(enclosed[holes], np.asarray(value, label.dtype), label) if enclosed.any() else label


Operation = Callable[
    [np.ndarray, Sequence[int], Step, Grid, SegmentationTargets], np.ndarray
]  # of the box that holds the class
OPERATIONS: dict[str, Operation] = {
    "keep_largest": _keep_largest,
    "remove_small": _remove_small,
    "fill_holes": _fill_holes,
}


def _components(mask: np.ndarray) -> np.ndarray:
    components, _ = ndimage.label(mask, _AROUND)
    return components


def _without(
    label: np.ndarray,
    components: np.ndarray,
    goes: np.ndarray,
    values: Sequence[int],
    targets: SegmentationTargets,
) -> np.ndarray:
    """The components that go, a flag each, become what remains without them: background, or the region
    around.
    """
    if not goes.any():
        return label
    removed = np.concatenate([[False], goes])[components]
    result = label.copy()
    for value in values:
        result[removed & (label == value)] = _remaining(value, values, targets)
    return result


def _remaining(value: int, values: Sequence[int], targets: SegmentationTargets) -> int:
    """What a voxel of `value` becomes that no longer belongs to `values`."""
    others = (
        v for v, held in zip(targets.order, targets.values, strict=False) if value in held and v not in values
    )
    return max(others, key=targets.order.index, default=0)


def _holding(value: int, targets: SegmentationTargets) -> set[str]:
    """The classes or regions that a label value belongs to."""
    return {name for name, values in targets.by_name.items() if value in values}


def _value(name: str, targets: SegmentationTargets) -> int:
    """The label value that a class or region writes."""
    index = targets.names.index(name)
    return targets.order[index] if targets.overlapping else targets.values[index][0]


def _values(of: str, targets: SegmentationTargets) -> tuple[int, ...]:
    if of == WHOLE:
        return tuple(sorted({value for values in targets.values for value in values}))
    if of not in targets.names:
        raise ValueError(f"`of` is {of!r:.80}, which is none of {', '.join(targets.names)}, nor {WHOLE}")
    return targets.by_name[of]


def _targets(content: Any, path: Path) -> SegmentationTargets:
    try:
        return SegmentationTargets.from_plain(content)
    except ValueError as error:
        raise ValueError(
            f"{path}: `targets` must give names, values and order of the classes ({error}), got "
            f"{content!r:.200}"
        ) from error
