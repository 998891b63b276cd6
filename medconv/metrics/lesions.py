"""Lesions: connected components of a mask, matched between prediction and reference by their overlap.

Source: Kirillov et al. 2019, Panoptic Segmentation, arXiv:1801.00868; Maier-Hein et al. 2024,
doi:10.1038/s41592-023-02151-z (matching by a stated threshold, one to one).
"""

from dataclasses import dataclass

import numpy as np
from scipy.ndimage import generate_binary_structure, label
from scipy.optimize import linear_sum_assignment


@dataclass(frozen=True)
class Lesions:
    """Lesions of a case and class. Args: overlaps: the intersection over union of each matched pair."""

    predicted: int
    reference: int
    overlaps: tuple[float, ...]

    @property
    def f1(self) -> float:
        return 2 * len(self.overlaps) / (self.predicted + self.reference)

    @property
    def panoptic_quality(self) -> float:
        """The mean overlap of matched lesions, times F1."""
        return 2 * sum(self.overlaps) / (self.predicted + self.reference)


def match(prediction: np.ndarray, reference: np.ndarray, iou: float) -> Lesions:
    """Match lesions one to one where their intersection over union is at least `iou`: of all pairings, that
    of the largest sum of overlaps. Above 0.5 there is only one.

    Voxels that touch by a face, an edge or a corner belong to one lesion.
    Shape: two masks of the same shape, (*spatial) bool.
    """
    touching = generate_binary_structure(prediction.ndim, prediction.ndim)
    (ours, predicted), (theirs, true) = (label(mask, touching) for mask in (prediction, reference))
    both = prediction & reference
    codes, counts = np.unique(ours[both].astype(np.int64) * (true + 1) + theirs[both], return_counts=True)
    common = np.stack(np.divmod(codes, true + 1)) - 1
    sizes = [np.bincount(labels.ravel(), minlength=1)[1:] for labels in (ours, theirs)]
    overlaps = counts / (sizes[0][common[0]] + sizes[1][common[1]] - counts)
    kept = overlaps >= iou
    return Lesions(predicted, true, _one_to_one(common[:, kept], overlaps[kept]))


def _one_to_one(pairs: np.ndarray, overlaps: np.ndarray) -> tuple[float, ...]:
    """The overlaps of the chosen pairs. Shape: pairs: (2, pairs), overlaps: (pairs)."""
    (rows, row), (columns, column) = (np.unique(numbers, return_inverse=True) for numbers in pairs)
    if len(rows) == len(columns) == len(overlaps):
        return tuple(overlaps.tolist())
    found = np.zeros((len(rows), len(columns)))
    found[row, column] = overlaps
    chosen = found[linear_sum_assignment(found, maximize=True)]
    return tuple(chosen[chosen > 0].tolist())
