"""Whether predicted probabilities are those of the reference."""

import numpy as np

_BINS = 15


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
