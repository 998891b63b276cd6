"""Statistics over cases: mean, sd, median, bootstrap interval; paired comparison of predictions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import wilcoxon

_RESAMPLES = 10_000
_AT_ONCE = 1_000_000  # random numbers per chunk: 8 MB


def describe(values: Sequence[float | None]) -> dict[str, float | int | None]:
    """`n` defined values, their `mean`, `sd` (with n - 1), `median`, and `low` to `high`.

    `low` to `high` is the 95 % confidence interval of the mean. Undefined results are None: all of them
    without a value, `sd` and the interval with one value.
    """
    defined = np.array([value for value in values if value is not None], float)
    if not len(defined):
        return {"n": 0, **dict.fromkeys(("mean", "sd", "median", "low", "high"))}
    low, high = interval(defined)
    sd = float(defined.std(ddof=1)) if len(defined) > 1 else None
    mean, median = float(defined.mean()), float(np.median(defined))
    return {"n": len(defined), "mean": mean, "sd": sd, "median": median, "low": low, "high": high}


def interval(values: np.ndarray) -> tuple[float | None, float | None]:
    """95 % interval of the mean: percentiles of the means of 10,000 resamples, with a fixed seed.

    With few values it is too narrow.
    Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
    """
    n = len(values)
    if n < 2:
        return None, None
    rng = np.random.default_rng(0)
    at_once = max(1, _AT_ONCE // n)
    sizes = [min(at_once, _RESAMPLES - start) for start in range(0, _RESAMPLES, at_once)]
    means = np.concatenate([values[rng.integers(n, size=(size, n))].mean(1) for size in sizes])
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def paired(first: Sequence[float | None], second: Sequence[float | None]) -> dict[str, Any]:
    """The difference `first` - `second` over the `n` cases in which both are defined, in the same order.

    Returns: `n`; `mean`, `mean_compare`: of both, over these cases; `difference`: its mean; `low`, `high`:
        the 95 % interval of that; `p`: of the two-sided Wilcoxon signed-rank test, 1 where no case differs.
    Source: Wilcoxon 1945, doi:10.2307/3001968; exact for up to 50 differences without ties or zeros (scipy).
    """
    both = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not both:
        return {"n": 0, **dict.fromkeys(("mean", "mean_compare", "difference", "low", "high", "p"))}
    means = dict(zip(("mean", "mean_compare"), np.mean(both, axis=0).tolist(), strict=True))
    difference = np.array([a - b for a, b in both])
    difference[np.abs(difference) < 1e-12] = 0  # equal up to rounding
    low, high = interval(difference)
    row = {"n": len(both), **means, "difference": float(difference.mean()), "low": low, "high": high}
    return {**row, "p": signed_rank(difference)}


def signed_rank(difference: np.ndarray) -> float:
    """Two-sided p of Wilcoxon's test without the equal pairs, exact for few pairs; 1 if all are equal."""
    differing = difference[difference != 0]  # with zeros SciPy approximates: p is too small for few pairs
    return float(wilcoxon(differing).pvalue) if len(differing) else 1.0


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """p-values corrected for multiple comparisons; None stays None and does not count.

    Source: Holm 1979, Scandinavian Journal of Statistics 6:65-70.
    """
    ordered = sorted((p, name) for name, p in p_values.items() if p is not None)
    corrected: dict[str, float | None] = dict.fromkeys(p_values)
    highest = 0.0
    for rank, (p, name) in enumerate(ordered):
        highest = max(highest, min(1.0, p * (len(ordered) - rank)))
        corrected[name] = highest
    return corrected
