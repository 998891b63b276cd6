"""Bootstrap confidence intervals of image-level metrics, and comparisons of two sets of predictions.

Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
"""

from collections.abc import Iterator

import numpy as np

from medconv.metrics import image_level
from medconv.metrics.image_level import ScoredTargets
from medconv.metrics.segmentation import MetricValues
from medconv.metrics.weighted import Columns

_WEIGHTS_PER_CHUNK = 4_000_000  # 32 MB


def intervals(
    targets: ScoredTargets, outputs: np.ndarray, truth: np.ndarray, samples: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """The 95 % confidence interval of each defined metric: percentiles over bootstrap samples of the cases.

    Samples in which a metric is undefined (no case of a rare class) are skipped. Needs at least two cases.
    """
    values = image_level.measure(targets, outputs, truth)
    resampled = _resampled_columns(targets, outputs, truth, samples, seed)
    limits: dict[str, tuple[float, float]] = {}
    for name, value in values.items():
        if value is None:
            continue
        low_and_high = _percentiles(resampled[name])
        if low_and_high is not None:
            limits[name] = low_and_high
    return limits


def paired(
    targets: ScoredTargets,
    outputs: np.ndarray,
    compared_outputs: np.ndarray,
    truth: np.ndarray,
    samples: int = 1000,
    seed: int = 0,
) -> dict[str, MetricValues]:
    """Compare two sets of predictions of the same cases, by the same bootstrap samples.

    Returns:
        For each metric `value` and `value_compare`, their `difference` with `low` and `high` (95 %), and
        `p`, twice the share of samples in which the difference has the other sign, at least
        2 / (samples + 1). None if the metric is undefined in one of them.
    """
    values = image_level.measure(targets, outputs, truth)
    compared_values = image_level.measure(targets, compared_outputs, truth)
    resampled = _resampled_columns(targets, outputs, truth, samples, seed)
    # the same seed draws the same cases
    compared_resampled = _resampled_columns(targets, compared_outputs, truth, samples, seed)
    return {
        name: _comparison(value, compared_values[name], resampled[name] - compared_resampled[name])
        for name, value in values.items()
    }


def _comparison(value: float | None, compared: float | None, differences: np.ndarray) -> MetricValues:
    """A row of `paired`. Shape: differences (samples,)."""
    row: MetricValues = {"value": value, "value_compare": compared}
    row |= dict.fromkeys(("difference", "low", "high", "p"))
    limits = _percentiles(differences)
    if value is None or compared is None or limits is None:
        return row
    low, high = limits
    # undefined where a sample has no case of a class
    differences = differences[~np.isnan(differences)]
    fewer = min(np.sum(differences <= 0), np.sum(differences >= 0))
    # + 1: the observed difference counts as one sample, so that p is never 0
    one_sided_p = (fewer + 1) / (len(differences) + 1)
    p = min(1.0, 2 * float(one_sided_p))
    return row | {"difference": value - compared, "low": low, "high": high, "p": p}


def _resampled_columns(
    targets: ScoredTargets, outputs: np.ndarray, truth: np.ndarray, samples: int, seed: int
) -> Columns:
    """Metrics of bootstrap samples, the same samples for any outputs; none for fewer than two cases."""
    outputs, truth = image_level.checked_arrays(targets, outputs, truth)
    if len(truth) < 2:
        samples = 0
    chunks = [
        image_level.sample_columns(targets, outputs, truth, counts)
        for counts in _sample_counts(len(truth), samples, seed)
    ]
    columns: Columns = {}
    for name in targets.metric_names:
        values = [chunk[name] for chunk in chunks]
        columns[name] = np.concatenate([np.zeros(0), *values])  # zeros(0): there may be no chunk
    return columns


def _sample_counts(cases: int, samples: int, seed: int) -> Iterator[np.ndarray]:
    """Chunks of weights, (samples of the chunk, cases): how often each sample drew each case."""
    rng = np.random.default_rng(seed)
    samples_per_chunk = max(1, _WEIGHTS_PER_CHUNK // max(1, cases))
    for start in range(0, samples, samples_per_chunk):
        size = min(samples_per_chunk, samples - start)
        drawn_cases = rng.integers(cases, size=(size, cases))
        # one `bincount` for all samples: each has its own range of numbers
        codes = drawn_cases + cases * np.arange(size)[:, None]
        counts = np.bincount(codes.ravel(), minlength=size * cases)
        yield counts.reshape(size, cases).astype(np.float64)


def _percentiles(values: np.ndarray) -> tuple[float, float] | None:
    """The 2.5th and 97.5th percentile of the defined values; None if there are none."""
    defined = values[~np.isnan(values)]
    if not len(defined):
        return None
    low, high = np.percentile(defined, [2.5, 97.5])
    return float(low), float(high)
