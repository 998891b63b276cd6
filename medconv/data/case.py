"""Cases, datasets, and the grid that relates voxels to the patient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import nibabel as nib
import numpy as np

from medconv.targets.base import Targets, names_of
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.parse import override
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import Argument, ArgumentError

Relabel = tuple[tuple[int, int], ...]  # pairs of value in the file and label value, see `Case.relabel`
MAX_SHEAR = 0.5  # degrees; more is not rounding but a tilted gantry


@dataclass(frozen=True)
class Grid:
    """Shape, spacing and orientation of a volume.

    Args:
        shape: (X, Y, Z) voxels; a 2D image has Z = 1.
        affine: 4 x 4, from voxel indices to mm (right, anterior, superior: RAS+); rows as nested tuples, so
            that grids can be compared and hashed.
    """

    shape: tuple[int, int, int]
    affine: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, shape: Sequence[int], affine: np.ndarray) -> Grid:
        """The grid of an array.

        Args:
            shape: (X, Y) or (X, Y, Z), and any axes of channels after these.
            affine: 4 x 4, from voxel indices to mm.
        """
        sizes = [int(size) for size in shape]
        x, y, z = (*sizes, 1)[:3]
        rows = tuple(tuple(float(number) for number in row) for row in affine)
        return cls((x, y, z), rows)

    @property
    def matrix(self) -> np.ndarray:
        """The affine as an array, 4 x 4 float64."""
        return np.array(self.affine, dtype=np.float64)

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """Distance between voxel centres along each axis of the array."""
        x, y, z = (float(length) for length in np.linalg.norm(self.matrix[:3, :3], axis=0))
        return x, y, z

    @property
    def voxel_mm3(self) -> float:
        """Volume of a voxel; also right for sheared affines."""
        return float(abs(np.linalg.det(self.matrix[:3, :3])))

    @property
    def shear(self) -> float:
        """Largest deviation of the axes from right angles, in degrees."""
        axes = self.matrix[:3, :3]
        unit_axes = axes / np.linalg.norm(axes, axis=0)
        # Scalar products of the axes: 0 for two axes at a right angle
        cosines = np.abs(unit_axes.T @ unit_axes - np.eye(3))
        return float(np.rad2deg(np.arcsin(cosines.max().clip(0, 1))))

    @property
    def orientation(self) -> str:
        """Anatomical directions of the array's axes, such as `RAS`."""
        return "".join(str(code) for code in nib.aff2axcodes(self.matrix))

    @property
    def canonical_axes(self) -> np.ndarray:
        """The canonical axis of each axis of the array, and its direction there, as nibabel has them.

        Canonical axes point right, anterior, superior. A single slice stays across the third axis, and its
        own two axes are those that it has as a slice of a volume: right and superior, if it is coronal.
        """
        axes: np.ndarray = nib.orientations.io_orientation(self.matrix)
        if self.shape[2] == 1:
            first_axis, second_axis, _ = axes[:, 0]
            axes[:, 0] = (0, 1, 2) if first_axis < second_axis else (1, 0, 2)
        return axes

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> Grid:
        """From what `asdict` gave, with lists in place of tuples, as JSON has it."""
        return cls(tuple(content["shape"]), tuple(map(tuple, content["affine"])))

    def with_spacing_mm(self, spacing_mm: Sequence[float] | None) -> Grid:
        """The grid with another spacing; None: its own.

        Orientation and centre stay, so two grids that differ only in the order of their axes still do so
        afterwards.

        Args:
            spacing_mm: right, anterior, superior; for a single slice two numbers, in this order, too.

        Raises:
            ValueError: the wrong count of numbers.
        """
        if spacing_mm is None:
            return self
        is_slice = self.shape[2] == 1
        if len(spacing_mm) != (2 if is_slice else 3):
            expected = "two numbers for one slice" if is_slice else "three numbers for a volume"
            raise ValueError(f"spacing_mm: expected {expected}, got {list(spacing_mm)}")
        canonical_axes = self.canonical_axes[: len(spacing_mm), 0].astype(int)
        matrix = self.matrix
        for array_axis, canonical_axis in enumerate(canonical_axes):
            matrix[:3, array_axis] *= spacing_mm[canonical_axis] / self.spacing_mm[array_axis]
        # The origin moves so that the centre of the volume stays
        centre = (np.array(self.shape) - 1) / 2
        matrix[:3, 3] += (self.matrix[:3, :3] - matrix[:3, :3]) @ centre
        return Grid.of(self.shape, matrix)

    def corner_distance(self, other_grid: Grid) -> float:
        """Largest distance between the corners of the volume on the two grids, in voxels of this grid."""
        # Corners lie half a voxel outside the outermost voxel centres
        ranges = [(-0.5, size - 0.5) for size in self.shape]
        corners = np.array([(*corner, 1) for corner in product(*ranges)])
        moved = corners @ other_grid.matrix.T @ np.linalg.inv(self.matrix).T
        return float(np.abs(moved - corners)[:, :3].max())


class SoftLabel(Protocol):
    """How the label of a case is read that is no single label map, see `features.raters`."""

    @property
    def further_files(self) -> tuple[Path | None, ...]:
        """Label files beside `Case.label`; None: one that this case lacks."""

    @property
    def further_relabels(self) -> tuple[Relabel | None, ...]:
        """As `Case.relabel`, for each of these files."""

    def declared(self, case: Case) -> list[Any]:
        """What a prepared label depends on beside its files, as plain values."""

    def label_map(self, case: Case) -> tuple[np.ndarray, Grid]:
        """The most probable class of each voxel, and the grid. Shape: (X, Y, Z) int16."""


@dataclass(frozen=True)
class Case:
    """One examination: image files with a label map, image-level values, or both.

    Args:
        id: names the case in messages and file names.
        images: one file per channel, or one file with the channels last; for DICOM the folder of a series,
            or one file of it.
        label: the label map, for segmentation.
        values: the image-level targets, see `targets/`; beside a label map, NaN where one is not known.
        group: cases of one group, such as a patient, stay in one split; empty: the case is its own group.
        split: `train`, `val` or `test` if the dataset defines it, else empty.
        source_spacing_mm: right, anterior, superior, in place of what the headers say; None: the headers.
        annotated: label values that the annotator looked for; None: all. Voxels of the other classes may be
            labelled as background.
        weight: how often training draws it, relative to other cases.
        relabel: pairs of label value in the file and label value in the dataset, for all declared values;
            None: they are the same.
        soft_label: None: the label is a label map.
        missing_channels: that the case lacks; `images` are then one file for each of the others.
        own_id: in its own dataset, where several are joined, which give ids of their own; else empty.
    """

    id: str
    images: tuple[Path, ...]
    label: Path | None = None
    values: tuple[float, ...] | None = None
    group: str = ""
    split: str = ""
    source_spacing_mm: tuple[float, ...] | None = None
    annotated: tuple[int, ...] | None = None
    weight: float = 1.0
    relabel: Relabel | None = None
    soft_label: SoftLabel | None = None
    missing_channels: tuple[int, ...] = ()
    own_id: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the case: images, then the label maps if there are some."""
        return (*self.images, *(path for path in self.label_files if path is not None))

    @property
    def label_files(self) -> tuple[Path | None, ...]:
        """`label` and what a `soft_label` adds; None: this case lacks one. Empty: the case has no label."""
        if self.label is None:
            return ()
        return (self.label, *(self.soft_label.further_files if self.soft_label else ()))


@dataclass(frozen=True)
class Dataset:
    """All cases of a dataset and the meaning of their labels.

    Args:
        name: for messages and default file names.
        cases: sorted by id.
        class_names: of label maps, the index is the label value and the first is the background; else the
            names of the targets.
        modalities: one per channel.
        errors: case id to an error found in the layout, such as a missing channel.
        targets: None: label maps of these classes.
    """

    name: str
    cases: tuple[Case, ...]
    class_names: tuple[str, ...]
    modalities: tuple[str, ...]
    errors: Mapping[str, str] = field(default_factory=dict)
    targets: Targets = field(default=None)  # type: ignore[assignment]

    @property
    def case_ids(self) -> list[str]:
        return [case.id for case in self.cases]

    def __post_init__(self) -> None:
        if self.targets is None:
            # The way to set a field of a frozen dataclass
            object.__setattr__(self, "targets", LabelMapTargets.of_classes(self.class_names))

    def with_targets(self, **settings: Any) -> Dataset:
        """The dataset with other targets; settings that are all None keep what the dataset declares.

        Args:
            settings: `regions`, `regions_order` and `ignore_label`, see `targets.parse.override`. If several
                values are ignored, label maps are read with the first in place of the others.

        Raises:
            ValueError: names the invalid setting, or one that is set although there are no label maps.
        """
        if settings.get("ignore_label") is not None and any(case.relabel for case in self.cases):
            raise ArgumentError(
                "ignore_label",
                ": label values are renumbered in joined datasets, in masks of 0 and 255, and where files "
                "name theirs by other numbers; in joined datasets, set ignore_label in each of ",
                Argument("entries"),
                " instead",
            )
        if isinstance(self.targets, SegmentationTargets):
            names_of(self.class_names)  # else the layout's names are wrong
        given = [name for name, value in settings.items() if value is not None]
        if not given:
            return self
        if not (isinstance(self.targets, SegmentationTargets) and self.targets.answers_classes):
            raise ArgumentError(
                given[0], f" is for label maps of classes, but this dataset has {self.targets.kind} targets"
            )
        names, targets = override(self.class_names, self.targets, **settings)
        dataset = replace(self, class_names=names, targets=targets)
        return dataset._with_one_ignored_value(targets) if targets.also_ignored else dataset

    def _with_one_ignored_value(self, targets: SegmentationTargets) -> Dataset:
        """The dataset whose cases relabel all ignored values to `targets.ignore`."""
        assert targets.ignore is not None
        unchanged = (*range(len(self.class_names)), targets.ignore)
        new_values = {value: value for value in unchanged}
        new_values |= dict.fromkeys(targets.also_ignored, targets.ignore)
        relabel = tuple(sorted(new_values.items()))
        cases = tuple(replace(case, relabel=relabel) for case in self.cases)
        return replace(self, cases=cases)
