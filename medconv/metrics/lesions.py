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
    """Lesions of a case and class.

    Args:
        predicted: number of lesions in the prediction.
        reference: number of lesions in the reference.
        overlaps: the intersection over union of each matched pair.
    """

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
    """As `match_numbered`. Voxels that touch by a face, an edge or a corner belong to one lesion.

    Shape: two masks of the same shape, (*spatial) bool.
    """
    connectivity = generate_binary_structure(prediction.ndim, prediction.ndim)
    predicted_lesions, _ = label(prediction, connectivity)
    reference_lesions, _ = label(reference, connectivity)
    return match_numbered(predicted_lesions, reference_lesions, iou)


def match_numbered(predicted: np.ndarray, reference: np.ndarray, iou: float) -> Lesions:
    """Match lesions one to one where their intersection over union is at least `iou`: of all pairings, that
    of the largest sum of overlaps. Above 0.5 there is only one.

    Shape: two maps of the same shape, (*spatial) integers, with a value for each lesion, from 1.
    """
    all_predicted_sizes = _sizes(predicted)
    all_reference_sizes = _sizes(reference)
    # number the pairs of lesions that share voxels, and count these voxels
    overlap = (predicted > 0) & (reference > 0)
    num_values = len(all_reference_sizes) + 1
    codes = predicted[overlap].astype(np.int64) * num_values + reference[overlap]
    pair_codes, shared_voxels = np.unique(codes, return_counts=True)
    predicted_index, reference_index = np.stack(np.divmod(pair_codes, num_values)) - 1
    predicted_sizes = all_predicted_sizes[predicted_index]
    reference_sizes = all_reference_sizes[reference_index]
    overlaps = shared_voxels / (predicted_sizes + reference_sizes - shared_voxels)
    # pairs below the threshold may not take a partner from others
    is_kept = overlaps >= iou
    matched = _one_to_one(predicted_index[is_kept], reference_index[is_kept], overlaps[is_kept])
    num_predicted = int(np.count_nonzero(all_predicted_sizes))
    num_reference = int(np.count_nonzero(all_reference_sizes))
    return Lesions(num_predicted, num_reference, matched)


def _sizes(lesions: np.ndarray) -> np.ndarray:
    """Voxels of each lesion. Shape: (*spatial), numbered from 1 -> (highest number,)."""
    return np.bincount(lesions.ravel(), minlength=1)[1:]


def _one_to_one(
    predicted_index: np.ndarray, reference_index: np.ndarray, overlaps: np.ndarray
) -> tuple[float, ...]:
    """The overlaps of the chosen pairs. Shape: all (pairs,)."""
    predicted, row = np.unique(predicted_index, return_inverse=True)
    reference, column = np.unique(reference_index, return_inverse=True)
    if len(predicted) == len(reference) == len(overlaps):
        return tuple(overlaps.tolist())  # no lesion has two partners
    overlap_matrix = np.zeros((len(predicted), len(reference)))
    overlap_matrix[row, column] = overlaps
    chosen = overlap_matrix[linear_sum_assignment(overlap_matrix, maximize=True)]
    return tuple(chosen[chosen > 0].tolist())
