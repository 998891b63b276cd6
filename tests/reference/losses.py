"""Oracle of the losses: voxel by voxel in float64."""

from collections.abc import Callable
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


def soft_skeleton(values: np.ndarray, iterations: int) -> np.ndarray:
    """Of one array (*spatial): what openings take away, voxel by voxel."""
    skeleton = np.zeros(values.shape)
    structure = values
    for _ in range(iterations + 1):
        removed = np.maximum(structure - _spread(_shrunk(structure)), 0)
        skeleton = skeleton + removed * (1 - skeleton)
        structure = _shrunk(structure)
    return skeleton


def _shrunk(values: np.ndarray) -> np.ndarray:
    """The smallest of a voxel and those that share a face with it."""
    return _over(values, min, lambda steps: sum(map(abs, steps)) <= 1)


def _spread(values: np.ndarray) -> np.ndarray:
    """The largest of a voxel and those that share a corner with it."""
    return _over(values, max, lambda steps: True)


def _over(values: np.ndarray, choose: Callable, is_near: Callable) -> np.ndarray:
    result = np.zeros(values.shape)
    all_steps = [steps for steps in product((-1, 0, 1), repeat=values.ndim) if is_near(steps)]
    for place in np.ndindex(values.shape):
        near = [tuple(np.add(place, steps)) for steps in all_steps]
        result[place] = choose(
            values[there]
            for there in near
            if all(0 <= t < n for t, n in zip(there, values.shape, strict=True))
        )
    return result
