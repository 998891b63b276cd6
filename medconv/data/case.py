"""Cases, datasets, and the grid that relates voxels to the patient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from medconv.targets import parse
from medconv.targets.base import Targets
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.segmentation import SegmentationTargets


@dataclass(frozen=True)
class Grid:
    """Shape, spacing and orientation of a volume: `affine` maps voxel indices to millimetres (RAS+).

    Args: shape: (X, Y, Z) voxels; a 2D image has Z = 1. affine: 4 x 4 rows, as nested tuples so that grids
    compare.
    """

    shape: tuple[int, int, int]
    affine: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, shape: Sequence[int], affine: np.ndarray) -> Grid:
        x, y, z = (*(int(n) for n in shape), 1)[:3]
        return cls((x, y, z), tuple(tuple(float(v) for v in row) for row in affine))

    @property
    def matrix(self) -> np.ndarray:
        return np.array(self.affine, dtype=np.float64)

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        x, y, z = (float(v) for v in np.linalg.norm(self.matrix[:3, :3], axis=0))
        return x, y, z

    @property
    def voxel_mm3(self) -> float:
        """Volume of a voxel; also right for sheared affines."""
        return float(abs(np.linalg.det(self.matrix[:3, :3])))

    @property
    def shear(self) -> float:
        """Largest deviation of the axes from right angles, in degrees."""
        unit = self.matrix[:3, :3] / np.linalg.norm(self.matrix[:3, :3], axis=0)
        return float(np.rad2deg(np.arcsin(np.abs(unit.T @ unit - np.eye(3)).max().clip(0, 1))))

    @property
    def orientation(self) -> str:
        """Where the array's axes point, such as `RAS`."""
        return "".join(str(code) for code in nib.aff2axcodes(self.matrix))

    def with_spacing_mm(self, spacing_mm: Sequence[float]) -> Grid:
        """The grid with another spacing; its orientation and its middle stay, so that two grids that differ
        in the order of their axes alone do so afterwards.

        Args: spacing_mm: right, anterior, superior; of a single slice two numbers, along its first two axes.
        Raises: ValueError: not as many numbers.
        """
        flat = self.shape[2] == 1
        if len(spacing_mm) != (2 if flat else 3):
            what = "two numbers for one slice" if flat else "three numbers for a volume"
            raise ValueError(f"data.source_spacing_mm: expected {what}, got {list(spacing_mm)}")
        axes = [0, 1] if flat else nib.orientations.io_orientation(self.matrix)[:, 0].astype(int)
        matrix = self.matrix
        for number, axis in enumerate(axes):
            matrix[:3, number] *= spacing_mm[axis] / self.spacing_mm[number]
        middle = (np.array(self.shape) - 1) / 2
        matrix[:3, 3] += (self.matrix[:3, :3] - matrix[:3, :3]) @ middle
        return Grid.of(self.shape, matrix)

    def corner_distance(self, other: Grid) -> float:
        """Largest distance between the corners of the volume on the two grids, in voxels of this grid."""
        corners = np.array([(*c, 1) for c in product(*[(-0.5, n - 0.5) for n in self.shape])])
        moved = corners @ other.matrix.T @ np.linalg.inv(self.matrix).T
        return float(np.abs(moved - corners)[:, :3].max())


@dataclass(frozen=True)
class Case:
    """One examination: image files with a label map or image-level values.

    Args:
        images: one file per channel, or one file with the channels last; for DICOM the folder of a series,
            or one file of it.
        label: the label map, for segmentation.
        values: the image-level targets, see `targets/`.
        group: cases of one group, such as a patient, stay in one split; empty: the case is its own group.
        split: `train`, `val` or `test` if the dataset defines it, else empty.
        annotated: label values that its annotator looked for; None: all. Where others are, is not known.
        weight: how often training draws it, relative to other cases.
        relabel: label value of its file to that of the dataset, for all declared ones; None: the same.
        source_spacing_mm: right, anterior, superior, in place of what the headers say; None: the headers.
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
    relabel: tuple[tuple[int, int], ...] | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.images, self.label) if self.label else self.images


@dataclass(frozen=True)
class Dataset:
    """All cases of a dataset and the meaning of their labels.

    Args:
        class_names: of label maps, the index is the label value and the first is the background; else the
            names of the targets.
        modalities: one per channel.
        errors: case id to an error that its layout shows, such as a missing channel.
        targets: None: label maps of these classes.
    """

    name: str
    cases: tuple[Case, ...]
    class_names: tuple[str, ...]
    modalities: tuple[str, ...]
    errors: Mapping[str, str] = field(default_factory=dict)
    targets: Targets = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.targets is None:
            object.__setattr__(self, "targets", LabelMapTargets.of_classes(self.class_names))

    def with_targets(self, **settings: Any) -> Dataset:
        """The dataset with the targets of the config; None of all keeps what the dataset declares.

        Args: settings: `regions`, `regions_order` and `ignore_label` of `data`; see `targets.parse.override`.
            Of several values to ignore, label maps are read with the first in the place of the others.
        Raises: ValueError: names the invalid key, or one that is set although there are no label maps.
        """
        if settings.get("ignore_label") is not None and any(case.relabel for case in self.cases):
            raise ValueError(
                "data.ignore_label: of joined datasets each of data.entries has its own key for it"
            )
        if isinstance(self.targets, SegmentationTargets):
            names, targets = parse.override(self.class_names, self.targets, **settings)
            changed = replace(self, class_names=names, targets=targets)
            return changed if not targets.also_ignored else changed._with_one_ignored(targets)
        for key, value in settings.items():
            if value is not None:
                raise ValueError(f"data.{key} is for label maps, but this dataset has image-level targets")
        return self

    def _with_one_ignored(self, targets: SegmentationTargets) -> Dataset:
        assert targets.ignore is not None
        declared = {value: value for value in (*range(len(self.class_names)), targets.ignore)}
        declared |= dict.fromkeys(targets.also_ignored, targets.ignore)
        relabel = tuple(sorted(declared.items()))
        return replace(self, cases=tuple(replace(case, relabel=relabel) for case in self.cases))
