"""Statistics over cases: mean, sd, median, bootstrap interval; paired comparison of predictions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import wilcoxon

_RESAMPLES = 10_000
_NUMBERS_PER_CHUNK = 1_000_000  # random numbers: 8 MB
_ROUNDING = 1e-12  # of the largest value; smaller differences are rounding errors


def describe(values: Sequence[float | None]) -> dict[str, float | int | None]:
    """`n` defined values, their `mean`, `sd` (with n - 1), `median`, and `low` to `high`.

    `low` to `high` is the 95 % confidence interval of the mean. Undefined results are None: all of them
    without a value, `sd` and the interval with one value.
    """
    defined = np.array([value for value in values if value is not None], float)
    if not len(defined):
        return {"n": 0, **dict.fromkeys(("mean", "sd", "median", "low", "high"))}
    low, high = interval(defined)
    return {
        "n": len(defined),
        "mean": float(defined.mean()),
        "sd": float(defined.std(ddof=1)) if len(defined) > 1 else None,
        "median": float(np.median(defined)),
        "low": low,
        "high": high,
    }


def interval(values: np.ndarray) -> tuple[float | None, float | None]:
    """95 % interval of the mean: percentiles of the means of 10,000 resamples, with a fixed seed.

    With few values it is too narrow.
    Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
    """
    n = len(values)
    if n < 2:
        return None, None
    chunk_means = [values[indices].mean(1) for indices in _resamples(n)]
    low, high = np.percentile(np.concatenate(chunk_means), [2.5, 97.5])
    return float(low), float(high)


def _resamples(n: int) -> Iterator[np.ndarray]:
    """Indices of resamples of n cases, in chunks; the same cases give the same interval in every report.

    Shape: each (resamples, n).
    """
    rng = np.random.default_rng(0)
    per_chunk = max(1, _NUMBERS_PER_CHUNK // n)
    for start in range(0, _RESAMPLES, per_chunk):
        yield rng.integers(n, size=(min(per_chunk, _RESAMPLES - start), n))


def interval_of_column_means(values: np.ndarray) -> tuple[float | None, float | None]:
    """As `interval`, of the mean over columns of each column's mean, where cases lack some of them.

    A column that no case of a resample has is left out of it.
    Shape: values (cases, columns), NaN where undefined.
    """
    n = len(values)
    if n < 2:
        return None, None
    known = ~np.isnan(values)
    filled = np.where(known, values, 0)
    chunk_means = []
    for indices in _resamples(n):
        size = len(indices)
        # how often each resample has each case
        numbered = indices + n * np.arange(size)[:, None]
        counts = np.bincount(numbered.ravel(), minlength=size * n).reshape(size, n).astype(float)
        weights = counts @ known
        means = np.divide(counts @ filled, weights, out=np.full(weights.shape, np.nan), where=weights > 0)
        chunk_means.append(np.nanmean(means, 1))
    low, high = np.nanpercentile(np.concatenate(chunk_means), [2.5, 97.5])
    return float(low), float(high)


def paired(first: Sequence[float | None], second: Sequence[float | None]) -> dict[str, Any]:
    """The difference `first` - `second` over the `n` cases in which both are defined, in the same order.

    Returns:
        `n`; `mean`, `mean_compare`: of both, over these cases; `difference`: its mean; `low`, `high`:
        the 95 % interval of that; `p`: of the two-sided Wilcoxon signed-rank test, 1 where no case differs.
    Source: Wilcoxon 1945, doi:10.2307/3001968; exact for up to 50 differences without ties or zeros (scipy).
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not pairs:
        return {"n": 0, **dict.fromkeys(("mean", "mean_compare", "difference", "low", "high", "p"))}
    mean_first, mean_second = np.mean(pairs, axis=0).tolist()
    differences = np.array([a - b for a, b in pairs])
    # Differences that are equal but for rounding have one rank, and the smallest are none
    step = _ROUNDING * float(np.abs(pairs).max()) or 1.0
    in_steps = np.round(differences / step)
    differences[in_steps == 0] = 0
    low, high = interval(differences)
    return {
        "n": len(pairs),
        "mean": mean_first,
        "mean_compare": mean_second,
        "difference": float(differences.mean()),
        "low": low,
        "high": high,
        "p": signed_rank(in_steps),
    }


def signed_rank(differences: np.ndarray) -> float:
    """Two-sided p of Wilcoxon's test without the equal pairs, exact for few pairs; 1 if all are equal."""
    # with zeros SciPy approximates: p is too small for few pairs
    differing = differences[differences != 0]
    return float(wilcoxon(differing).pvalue) if len(differing) else 1.0


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """p-values corrected for multiple comparisons; None stays None and does not count.

    Source: Holm 1979, Scandinavian Journal of Statistics 6:65-70.
    """
    ordered = sorted((p, name) for name, p in p_values.items() if p is not None)
    corrected: dict[str, float | None] = dict.fromkeys(p_values)
    highest = 0.0
    for rank, (p, name) in enumerate(ordered):
        remaining_tests = len(ordered) - rank
        # no corrected p is below that of a smaller p
        highest = max(highest, min(1.0, p * remaining_tests))
        corrected[name] = highest
    return corrected
