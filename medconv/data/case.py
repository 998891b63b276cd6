"""What a case is: files, and the grid that ties their voxels to the patient. The start of the way of a
case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import nibabel as nib
import numpy as np

from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.segmentation import SegmentationTargets


@dataclass(frozen=True)
class Grid:
    """Shape, spacing and orientation of a volume, together: `affine` maps voxel indices to millimetres
    (RAS+).

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
        """A voxel's volume, of sheared affines as well."""
        return float(abs(np.linalg.det(self.matrix[:3, :3])))

    @property
    def shear(self) -> float:
        """How far its axes are from right angles, in degrees."""
        unit = self.matrix[:3, :3] / np.linalg.norm(self.matrix[:3, :3], axis=0)
        return float(np.rad2deg(np.arcsin(np.abs(unit.T @ unit - np.eye(3)).max().clip(0, 1))))

    @property
    def orientation(self) -> str:
        """Where the array's axes point, such as `RAS`."""
        return "".join(str(code) for code in nib.aff2axcodes(self.matrix))

    def corner_distance(self, other: Grid) -> float:
        """How far apart the two grids put the volume's corners: the largest distance, in this grid's
        voxels.
        """
        corners = np.array([(*c, 1) for c in product(*[(-0.5, n - 0.5) for n in self.shape])])
        there = corners @ other.matrix.T @ np.linalg.inv(self.matrix).T
        return float(np.abs(there - corners)[:, :3].max())


@dataclass(frozen=True)
class Case:
    """One patient's examination: an image per channel (or one with the channels last) and what is known of
    it.

    Args:
        images: files; of DICOM, a series' folder, or a file that stands for its series.
        label: a label map, of segmentation.
        values: of the whole image, as `ImageLevelTargets` says.
        group: what must not be divided between training and validation, such as a patient; empty: the case
            alone.
        part: where the dataset says so, `train`, `val` or `test`.
    """

    id: str
    images: tuple[Path, ...]
    label: Path | None = None
    values: tuple[float, ...] | None = None
    group: str = ""
    part: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.images, self.label) if self.label else self.images


@dataclass(frozen=True)
class Dataset:
    """All cases of a dataset and what their values mean.

    Args:
        class_names: index is the label value; the first is the background.
        modalities: one per channel.
        faults: case id to what its layout shows to be wrong with it, such as a missing channel.
        wanted: what a network is asked for; None: each class.
        outcome: what is asked of whole images; None: label maps.
    """

    name: str
    cases: tuple[Case, ...]
    class_names: tuple[str, ...]
    modalities: tuple[str, ...]
    faults: Mapping[str, str] = field(default_factory=dict)
    wanted: SegmentationTargets | None = None
    image_targets: ImageLevelTargets | None = None

    @property
    def targets(self) -> SegmentationTargets:
        return self.wanted or SegmentationTargets.of_classes(self.class_names)

    @property
    def num_values(self) -> int:
        """A label map of this dataset holds values below this."""
        return 1 + max(len(self.class_names) - 1, self.targets.ignore or 0)
