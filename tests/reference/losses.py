"""Oracle of the losses: voxel by voxel in float64."""

from itertools import product
from math import exp, log

import numpy as np


def dice_cross_entropy(
    logits: np.ndarray,
    label: np.ndarray,
    dice_weight: float = 1.0,
    ce_weight: float = 1.0,
    smooth: float = 1e-5,
) -> float:
    """Logits (batch, classes, *spatial), label (batch, 1, *spatial); counts run over the whole batch."""
    classes = logits.shape[1]
    cross_entropy, voxels = 0.0, 0
    both, predicted, reference = [0.0] * classes, [0.0] * classes, [0.0] * classes
    for b, *position in product(range(len(logits)), *map(range, logits.shape[2:])):
        scores = [float(logits[(b, c, *position)]) for c in range(classes)]
        largest = max(scores)
        total = sum(exp(s - largest) for s in scores)
        true = int(label[(b, 0, *position)])
        cross_entropy -= scores[true] - largest - log(total)
        voxels += 1
        for c in range(classes):
            probability = exp(scores[c] - largest) / total
            predicted[c] += probability
            reference[c] += c == true
            both[c] += probability * (c == true)
    dice = [(2 * both[c] + smooth) / (predicted[c] + reference[c] + smooth) for c in range(1, classes)]
    return ce_weight * cross_entropy / voxels + dice_weight * (1 - sum(dice) / len(dice))


def dice_binary_cross_entropy(
    logits: np.ndarray,
    masks: np.ndarray,
    labelled: np.ndarray,
    dice_weight: float = 1.0,
    ce_weight: float = 1.0,
) -> float:
    """Logits and masks (batch, regions, *spatial), labelled (batch, 1, *spatial); counts run over the labelled
    voxels of the batch.
    """
    regions = logits.shape[1]
    entropy, voxels = 0.0, 0
    both, sizes = [0.0] * regions, [0.0] * regions
    for b, *position in product(range(len(logits)), *map(range, logits.shape[2:])):
        if not labelled[(b, 0, *position)]:
            continue
        voxels += 1
        for r in range(regions):
            probability, inside = (
                1 / (1 + exp(-float(logits[(b, r, *position)]))),
                float(masks[(b, r, *position)]),
            )
            entropy -= log(probability if inside else 1 - probability)
            both[r] += probability * inside
            sizes[r] += probability + inside
    dice = [(2 * both[r] + 1e-5) / (sizes[r] + 1e-5) for r in range(regions)]
    return ce_weight * entropy / (voxels * regions) + dice_weight * (1 - sum(dice) / regions)
