"""Metrics of image-level predictions (classification, regression) with bootstrap confidence intervals.

Each metric is a function of weights of cases: 1, or how often a bootstrap sample drew the case. So a thousand
samples are a few matrix products, and a metric and its interval come from the same code.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from medconv.metrics.segmentation import MetricValues

BINS = 15  # of the calibration error
THRESHOLD = 0.5  # multilabel: a label with a probability above it is predicted
OF_CLASSES = ("auc", "accuracy", "balanced_accuracy", "f1", "calibration_error")
OF_NUMBERS = ("mae", "rmse", "r2", "pearson")
_SMALLEST = 1e-7  # probability, so that its logarithm is finite
_AT_ONCE = 4_000_000  # weights of cases per chunk: 32 MB
_CONSTANT = 1e-12  # a spread below this share of the largest value is rounding error
Columns = dict[str, np.ndarray]  # metric to one value for each sample


class Outputs(Protocol):
    """What the functions below need to know of image-level targets; `targets/` has them."""

    @property
    def metric_names(self) -> tuple[str, ...]: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def num_values(self) -> int: ...

    def columns(self, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns: ...


def measure(targets: Outputs, outputs: np.ndarray, truth: np.ndarray) -> MetricValues:
    """The metrics of `targets.metric_names`; None if undefined.

    Shape: outputs (cases, names), probabilities or numbers; truth (cases, values).
    """
    outputs, truth = _checked(targets, outputs, truth)
    return _plain(_columns(targets, outputs, truth, np.ones((1, len(truth)))))


def per_class(
    names: Sequence[str], outputs: np.ndarray, predicted: np.ndarray, positive: np.ndarray
) -> dict[str, MetricValues]:
    """For each class or label: `auc`, `sensitivity`, `specificity`, `precision`, and `cases` that have it.

    Shape: all (cases, names); outputs: probabilities.
    """
    rows: dict[str, MetricValues] = {}
    for name, score, f, t in zip(names, outputs.T, predicted.T, positive.T, strict=True):
        both = float((f & t).sum())
        columns = {
            "auc": _auc(score, t, np.ones((1, len(t)))),
            "sensitivity": _ratio(both, t.sum()),
            "specificity": _ratio((~f & ~t).sum(), (~t).sum()),
            "precision": _ratio(both, f.sum()),
        }
        rows[name] = {**_plain(columns), "cases": int(t.sum())}
    return rows


def intervals(
    targets: Outputs, outputs: np.ndarray, truth: np.ndarray, samples: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """The 95 % confidence interval of each defined metric: percentiles over bootstrap samples of the cases.

    Samples in which a metric is undefined (no case of a rare class) are skipped. Needs at least two cases.
    Source: Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13.
    """
    values = measure(targets, outputs, truth)
    resampled = _bootstrap(targets, outputs, truth, samples, seed)
    ends = {name: _middle(resampled[name]) for name, value in values.items() if value is not None}
    return {name: low_high for name, low_high in ends.items() if low_high is not None}


def paired(
    targets: Outputs,
    outputs: np.ndarray,
    others: np.ndarray,
    truth: np.ndarray,
    samples: int = 1000,
    seed: int = 0,
) -> dict[str, MetricValues]:
    """Compare two sets of predictions of the same cases, by the same bootstrap samples.

    Returns: for each metric `value` and `value_compare`, their `difference` with `low` and `high` (95 %), and
        `p`, twice the share of samples in which the difference has the other sign, at least
        2 / (samples + 1). None if the metric is undefined in one of them.
    """
    first, second = measure(targets, outputs, truth), measure(targets, others, truth)
    draws, other_draws = (_bootstrap(targets, part, truth, samples, seed) for part in (outputs, others))
    rows: dict[str, MetricValues] = {}
    for name, value in first.items():
        other, off = second[name], draws[name] - other_draws[name]
        row = rows[name] = {"value": value, "value_compare": other}
        row |= dict.fromkeys(("difference", "low", "high", "p"))
        if value is not None and other is not None and (ends := _middle(off)) is not None:
            off = off[~np.isnan(off)]
            share = (min(np.sum(off <= 0), np.sum(off >= 0)) + 1) / (len(off) + 1)
            p = min(1.0, 2 * float(share))
            row |= {"difference": value - other, "low": ends[0], "high": ends[1], "p": p}
    return rows


def log_loss(probabilities: np.ndarray, groups: np.ndarray) -> float:
    """Mean negative logarithm of the probabilities of the truth: half over all, half over groups.

    Over all alone a rare class hardly counts, over groups alone its few cases decide.
    Args: groups: a number from 0 for each probability, such as the class.
    """
    losses, groups = -np.log(probabilities.clip(_SMALLEST)).ravel(), groups.ravel()
    counts = np.bincount(groups)
    means = np.bincount(groups, losses)[counts > 0] / counts[counts > 0]
    return float((losses.mean() + means.mean()) / 2)


def bins(probabilities: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean probability, share of correct predictions and number of cases per bin; NaN in empty bins."""
    member = _membership(probabilities)
    counts = member.sum(0)
    return _ratio(probabilities @ member, counts), _ratio(right @ member, counts), counts


def auc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Area under the ROC curve: the share of ordered (positive, negative) pairs; ties count 1/2."""
    return _plain({"auc": _auc(scores, positive, np.ones((1, len(scores))))})["auc"]


def _checked(targets: Outputs, outputs: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    outputs, truth = np.asarray(outputs, np.float64), np.asarray(truth, np.float64)
    assert outputs.shape == (len(truth), len(targets.names))
    assert truth.shape == (len(truth), targets.num_values)
    return outputs, truth


def _bootstrap(targets: Outputs, outputs: np.ndarray, truth: np.ndarray, samples: int, seed: int) -> Columns:
    """Metrics of bootstrap samples, the same samples for any outputs; none for fewer than two cases."""
    pair = _checked(targets, outputs, truth)
    weights = _resamples(len(truth), samples if len(truth) > 1 else 0, seed)
    parts = [_columns(targets, *pair, counts) for counts in weights]
    return {n: np.concatenate([np.zeros(0), *(part[n] for part in parts)]) for n in targets.metric_names}


def _middle(values: np.ndarray) -> tuple[float, float] | None:
    """The 2.5th and 97.5th percentile; None if no value is defined."""
    values = values[~np.isnan(values)]
    return tuple(float(end) for end in np.percentile(values, [2.5, 97.5])) if len(values) else None  # type: ignore[return-value]


def _plain(columns: Columns) -> MetricValues:
    """The values of the first sample."""
    first = {name: float(values[0]) for name, values in columns.items()}
    return {name: value if np.isfinite(value) else None for name, value in first.items()}


def _resamples(cases: int, samples: int, seed: int) -> Iterator[np.ndarray]:
    """Chunks of weights, (samples of the chunk, cases): how often each sample drew each case."""
    rng, at_once = np.random.default_rng(seed), max(1, _AT_ONCE // max(1, cases))
    for start in range(0, samples, at_once):
        size = min(at_once, samples - start)
        indices = rng.integers(cases, size=(size, cases)) + cases * np.arange(size)[:, None]
        yield np.bincount(indices.ravel(), minlength=size * cases).reshape(size, cases).astype(np.float64)


def _columns(targets: Outputs, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns:
    """Shape: counts (samples, cases) -> for each metric (samples,), NaN where undefined."""
    if not len(truth) or not (np.isfinite(outputs).all() and np.isfinite(truth).all()):
        return {name: np.full(len(counts), np.nan) for name in targets.metric_names}
    return targets.columns(outputs, truth, counts)


def mean_of(rows: Sequence[Columns]) -> Columns:
    """The mean over labels or numbers, without undefined ones."""
    return {name: _mean(np.stack([row[name] for row in rows], 1)) for name in rows[0]}


def multiclass_metrics(
    outputs: np.ndarray, called: np.ndarray, positive: np.ndarray, counts: np.ndarray
) -> Columns:
    """Metrics of exclusive classes.

    `auc`: one against the rest, mean over classes (of two classes, that of the second); `accuracy`;
    `balanced_accuracy`: the mean sensitivity of the classes; `f1`: the mean over classes;
    `calibration_error`: the expected one of the highest probability, in 15 bins. Means skip classes without a
    case (`f1`: without a case or a prediction); `auc` needs cases of two classes.
    Shape: outputs, called (predicted), positive (true): (cases, classes); counts (samples, cases).
    Source: Naeini et al. 2015, doi:10.1609/aaai.v29i1.9602; Guo et al. 2017, arXiv:1706.04599 (calibration).
    """
    classes, right = outputs.shape[1], (called & positive).any(1)
    scored = range(1, 2) if classes == 2 else range(classes)
    both, predicted, present = (counts @ part.astype(float) for part in (called & positive, called, positive))
    return {
        "auc": _mean(np.stack([_auc(outputs[:, c], positive[:, c], counts) for c in scored], 1)),
        "accuracy": counts @ right / counts.sum(1),
        "balanced_accuracy": _mean(_ratio(both, present)),
        "f1": _mean(_ratio(2 * both, predicted + present)),
        "calibration_error": _calibration(outputs.max(1), right, counts),
    }


def multilabel_metrics(score: np.ndarray, positive: np.ndarray, counts: np.ndarray) -> Columns:
    """The same metrics of one label, predicted above 0.5. Shape: score, positive (cases,)."""
    called = score > THRESHOLD
    both, predicted, present = (counts @ part for part in (called & positive, called, positive))
    right = called == positive
    recalls = [_ratio(counts @ (mask & right), counts @ mask) for mask in (positive, ~positive)]
    return {
        "auc": _auc(score, positive, counts),
        "accuracy": counts @ right / counts.sum(1),
        "balanced_accuracy": _mean(np.stack(recalls, 1)),
        "f1": _ratio(2 * both, predicted + present),
        "calibration_error": _calibration(score, positive, counts),
    }


def regression_metrics(output: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns:
    """`mae`, `rmse`, `r2` and `pearson` of one number. Shape: output, truth (cases,)."""
    total, off = counts.sum(1), output - truth
    squares = counts @ off**2 / total
    x, y = output - output.mean(), truth - truth.mean()
    mean_x, mean_y = counts @ x / total, counts @ y / total
    covariance = counts @ (x * y) / total - mean_x * mean_y
    spread_x = _spread(counts @ x**2 / total - mean_x**2, output)
    spread_y = _spread(counts @ y**2 / total - mean_y**2, truth)
    return {
        "mae": counts @ np.abs(off) / total,
        "rmse": np.sqrt(squares),
        "r2": 1 - _ratio(squares, spread_y),
        "pearson": _ratio(covariance, np.sqrt(spread_x * spread_y)).clip(-1, 1),
    }


def _spread(variance: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The variance; 0 if it is only rounding error."""
    return np.where(variance <= (_CONSTANT * np.abs(values).max()) ** 2, 0, variance)


def _auc(scores: np.ndarray, positive: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sort cases by score: a pair counts 1 if the negative has the lower score, 1/2 if both are equal."""
    if not len(scores):
        return np.full(len(counts), np.nan)
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    of_positives, of_negatives = (
        np.add.reduceat(counts[:, order] * mask[order], starts, axis=1) for mask in (positive, ~positive)
    )
    lower = np.cumsum(of_negatives, axis=1) - of_negatives / 2
    return _ratio((of_positives * lower).sum(1), of_positives.sum(1) * of_negatives.sum(1))


def _calibration(probabilities: np.ndarray, right: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean over cases of |mean probability - share of correct predictions| of their bin."""
    member = _membership(probabilities)
    errors: np.ndarray = np.abs(counts @ (member * (right - probabilities)[:, None])).sum(1) / counts.sum(1)
    return errors


def _membership(probabilities: np.ndarray) -> np.ndarray:
    """(cases,) -> (cases, 15), one-hot over bins of equal width; the last includes its upper edge."""
    index = np.searchsorted(np.linspace(0, 1, BINS + 1), probabilities, side="right") - 1
    member: np.ndarray = index.clip(0, BINS - 1)[:, None] == np.arange(BINS)
    return member.astype(float)


def _ratio(part: np.ndarray | float, whole: np.ndarray | float) -> np.ndarray:
    """part / whole; NaN if the whole is 0."""
    part, whole = np.atleast_1d(part).astype(float), np.atleast_1d(whole).astype(float)
    ratio: np.ndarray = np.full(np.broadcast(part, whole).shape, np.nan)
    np.divide(part, whole, out=ratio, where=whole != 0)
    return ratio


def _mean(values: np.ndarray) -> np.ndarray:
    """Mean over the second axis, without NaN; (samples, names) -> (samples,)."""
    defined = ~np.isnan(values)
    return _ratio(np.where(defined, values, 0).sum(1), defined.sum(1))
