"""Whether predicted probabilities are those of the reference, and the temperature at which they are."""

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

LARGEST_TEMPERATURE = 100.0
_BINS = 15
_SMALLEST_PROBABILITY = 2.0**-149  # of float32; its logarithm is finite


def brier(predicted: np.ndarray, reference: np.ndarray) -> float:
    """The mean squared difference of probabilities; 0 is perfect. Shape: two of any one shape.

    Source: Brier 1950, doi:10.1175/1520-0493(1950)078<0001:VOFEIT>2.0.CO;2, of one class against the others.
    """
    return float(np.square(predicted - reference, dtype=np.float64).mean())


def calibration_error(predicted: np.ndarray, reference: np.ndarray) -> float:
    """Expected calibration error: how far the mean reference of voxels is from their mean prediction, in bins
    of the prediction, weighted by their voxels. 0 is perfect.

    Shape: two of any one shape, from 0 to 1.
    Source: Guo et al. 2017, arXiv:1706.04599, with 15 bins of equal width; here of one class against the
        others, and the reference may be any probability.
    """
    # A probability of 1 belongs to the last bin.
    bins = np.minimum((predicted * _BINS).astype(np.int64), _BINS - 1).ravel()
    # In each bin, the number of its voxels cancels against the weight of its mean.
    gaps = np.bincount(bins, (predicted - reference).ravel().astype(np.float64), minlength=_BINS)
    return float(np.abs(gaps).sum() / predicted.size)


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
