"""The temperature at which predicted probabilities are those of the reference."""

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from medconv.targets.scores import LARGEST_TEMPERATURE

_SMALLEST_PROBABILITY = 2.0**-149  # of float32; its logarithm is finite


def temperature(probabilities: np.ndarray, truth: np.ndarray) -> float:
    """The temperature at which probabilities have the lowest cross-entropy; above 1, they are overconfident.

    It is never below 1: where all cases are right, ever lower ones would fit better.

    Shape: probabilities (..., classes), truth (...): the index of each case's class.
    Source: Guo et al. 2017, arXiv:1706.04599.
    """
    logits = _logits(probabilities)
    true_class = truth[..., None].astype(int)

    def loss(inverse: float) -> float:
        log_probabilities = log_softmax(inverse * logits, axis=-1)
        return float(-np.take_along_axis(log_probabilities, true_class, -1).mean())

    # Convex in the inverse, by which logits are multiplied
    found = minimize_scalar(
        loss, bounds=(1 / LARGEST_TEMPERATURE, 1), method="bounded", options={"xatol": 1e-6}
    )
    return float(1 / found.x) if found.fun < loss(1) else 1.0


def at_temperature(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    """The softmax of logits that are divided by a temperature, from their softmax. Shape: (..., classes)."""
    scaled: np.ndarray = softmax(_logits(probabilities) / temperature, axis=-1)
    return scaled


def _logits(probabilities: np.ndarray) -> np.ndarray:
    """Logits that have these probabilities, in double precision. Shape: (..., classes)."""
    exact = np.asarray(probabilities, np.float64)
    logits: np.ndarray = np.log(exact.clip(_SMALLEST_PROBABILITY))
    return logits
