"""Oracle of the losses: voxel by voxel in float64."""

from itertools import product
from math import exp, log

import numpy as np


def dice_cross_entropy(
    logits: np.ndarray, label: np.ndarray, dice_weight: float = 1.0, ce_weight: float = 1.0, smooth: float = 1e-5
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
