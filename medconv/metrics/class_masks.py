"""One class of a case as two masks, with what several metrics measure of them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from medconv.metrics import centreline, surface_distance
from medconv.metrics import lesions as lesion_matching


@dataclass(frozen=True)
class ClassMasks:
    """One class of a case, in at least one of the two label maps.

    Args:
        prediction: mask, (*spatial) bool.
        reference: mask of the same shape.
        spacing_mm: of each axis of the masks.
        voxel_mm3: volume of a voxel.
        tolerance_mm: of the surface Dice.
        lesion_iou: overlap from which lesions match; only lesion-wise metrics need it.
    """

    prediction: np.ndarray
    reference: np.ndarray
    spacing_mm: tuple[float, ...]
    voxel_mm3: float
    tolerance_mm: float
    lesion_iou: float | None = None

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Voxels of the prediction and of the reference."""
        return int(self.prediction.sum()), int(self.reference.sum())

    @cached_property
    def distances(self) -> surface_distance.Distances:
        """In mm, between boundary voxels, in both directions."""
        return surface_distance.voxel_distances(self.prediction, self.reference, self.spacing_mm)

    @cached_property
    def lesions(self) -> lesion_matching.Lesions:
        """The connected components of both masks, matched."""
        assert self.lesion_iou is not None
        return lesion_matching.match(self.prediction, self.reference, self.lesion_iou)

    @cached_property
    def centrelines(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the prediction and of the reference; masks."""
        return centreline.skeleton(self.prediction), centreline.skeleton(self.reference)
