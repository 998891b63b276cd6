"""Metrics of image-level predictions (classification, regression), of all cases or of samples of them."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from medconv.metrics.segmentation import MetricValues

_SMALLEST_PROBABILITY = 1e-7  # so that its logarithm is finite
BINS = 15  # of the calibration error
THRESHOLD = 0.5  # multilabel: a label with a probability above it is predicted
OF_CLASSES = ("auc", "accuracy", "balanced_accuracy", "f1", "calibration_error")
OF_NUMBERS = ("mae", "rmse", "r2", "pearson")
_CONSTANT = 1e-12  # a spread below this share of the largest value is rounding error
_DISPLAY_NAMES = {"auc": "AUC", "f1": "F1", "mae": "mean absolute error", "rmse": "RMSE", "r2": "R2"}
Columns = dict[str, np.ndarray]  # metric to one value for each sample
_WEIGHTS_PER_CHUNK = 4_000_000  # 32 MB


class ScoredTargets(Protocol):
    """What the functions below need to know of image-level targets, which implement it."""

    @property
    def metric_names(self) -> tuple[str, ...]: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def num_values(self) -> int: ...

    def columns(self, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns: ...


def words(name: str) -> str:
    """The display name of a metric."""
    return _DISPLAY_NAMES.get(name, name.replace("_", " "))


def measure(targets: ScoredTargets, outputs: np.ndarray, truth: np.ndarray) -> MetricValues:
    """The metrics of `targets.metric_names`; None if undefined.

    Shape: outputs (cases, names), probabilities or numbers; truth (cases, values).
    """
    outputs, truth = checked_arrays(targets, outputs, truth)
    each_case_once = np.ones((1, len(truth)))
    return _first_sample(sample_columns(targets, outputs, truth, each_case_once))


def per_class(
    names: Sequence[str], outputs: np.ndarray, predicted: np.ndarray, positive: np.ndarray
) -> dict[str, MetricValues]:
    """For each class or label: `auc`, `sensitivity`, `specificity`, `precision`, and `cases` that have it.

    Shape: all (cases, names); outputs: probabilities.
    """
    columns = zip(names, outputs.T, predicted.T, positive.T, strict=True)
    return {
        name: _class_metrics(scores, is_predicted, is_positive)
        for name, scores, is_predicted, is_positive in columns
    }


def _class_metrics(scores: np.ndarray, is_predicted: np.ndarray, is_positive: np.ndarray) -> MetricValues:
    true_positives = float((is_predicted & is_positive).sum())
    true_negatives = (~is_predicted & ~is_positive).sum()
    columns = {
        "auc": auc_of_samples(scores, is_positive, np.ones((1, len(is_positive)))),
        "sensitivity": ratio(true_positives, is_positive.sum()),
        "specificity": ratio(true_negatives, (~is_positive).sum()),
        "precision": ratio(true_positives, is_predicted.sum()),
    }
    return {**_first_sample(columns), "cases": int(is_positive.sum())}


def log_loss(probabilities: np.ndarray, groups: np.ndarray) -> float:
    """Mean negative logarithm of the probabilities of the truth: half over all, half over groups.

    With the mean over all alone a rare class hardly counts; with the mean over groups alone its few cases
    decide.

    Args:
        groups: a number from 0 for each probability, such as the class.
    """
    losses = -np.log(probabilities.clip(_SMALLEST_PROBABILITY)).ravel()
    groups = groups.ravel()
    counts = np.bincount(groups)
    sums = np.bincount(groups, losses)
    is_present = counts > 0
    group_means = sums[is_present] / counts[is_present]
    return float((losses.mean() + group_means.mean()) / 2)


def bins(probabilities: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean probability, share of correct predictions and number of cases per bin; NaN in empty bins."""
    membership = bin_membership(probabilities)
    counts = membership.sum(0)
    mean_probabilities = ratio(probabilities @ membership, counts)
    shares_correct = ratio(right @ membership, counts)
    return mean_probabilities, shares_correct, counts


def auc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Area under the ROC curve: the share of ordered (positive, negative) pairs; ties count 1/2."""
    each_case_once = np.ones((1, len(scores)))
    return _first_sample({"auc": auc_of_samples(scores, positive, each_case_once)})["auc"]


def checked_arrays(
    targets: ScoredTargets, outputs: np.ndarray, truth: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs (cases, names) and truth (cases, values) in double precision."""
    outputs = np.asarray(outputs, np.float64)
    truth = np.asarray(truth, np.float64)
    assert outputs.shape == (len(truth), len(targets.names))
    assert truth.shape == (len(truth), targets.num_values)
    return outputs, truth


def sample_columns(
    targets: ScoredTargets, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray
) -> Columns:
    """The metrics of each sample of cases; NaN where undefined.

    Shape: outputs (cases, names), truth (cases, values), counts (samples, cases): how often each sample has
        each case -> per metric (samples,).
    """
    # what is missing in the truth is left out by kinds that take it
    is_finite = np.isfinite(outputs).all() and not np.isinf(truth).any()
    if not len(truth) or not is_finite:
        return {name: np.full(len(counts), np.nan) for name in targets.metric_names}
    return targets.columns(outputs, truth, counts)


def _first_sample(columns: Columns) -> MetricValues:
    """The values of the first sample; None if undefined."""
    values = {name: float(column[0]) for name, column in columns.items()}
    return {name: value if np.isfinite(value) else None for name, value in values.items()}


def mean_of(rows: Sequence[Columns]) -> Columns:
    """The mean over labels or numbers, without undefined ones."""
    means: Columns = {}
    for metric in rows[0]:
        values = np.stack([row[metric] for row in rows], 1)
        means[metric] = mean_of_defined(values)
    return means


def multiclass_metrics(
    outputs: np.ndarray, predicted: np.ndarray, positive: np.ndarray, counts: np.ndarray
) -> Columns:
    """Metrics of exclusive classes.

    `auc`: one class against all others, mean over classes (with two classes, that of the second);
    `accuracy`; `balanced_accuracy`: the mean sensitivity of the classes; `f1`: the mean over classes;
    `calibration_error`: the expected one of the highest probability, in 15 bins. Means skip classes without a
    case (`f1`: without a case or a prediction); `auc` needs cases of two classes.
    Shape: outputs, predicted, positive (true): (cases, classes); counts (samples, cases).
    Source: Naeini et al. 2015, doi:10.1609/aaai.v29i1.9602; Guo et al. 2017, arXiv:1706.04599 (calibration).
    """
    num_classes = outputs.shape[1]
    # the AUC of the first of two classes equals that of the second
    scored_classes = range(1, 2) if num_classes == 2 else range(num_classes)
    class_aucs = [auc_of_samples(outputs[:, index], positive[:, index], counts) for index in scored_classes]
    is_right = (predicted & positive).any(1)
    # weighted numbers of cases: (samples, classes)
    true_positives = counts @ (predicted & positive).astype(float)
    num_predicted = counts @ predicted.astype(float)
    num_positive = counts @ positive.astype(float)
    return {
        "auc": mean_of_defined(np.stack(class_aucs, 1)),
        "accuracy": counts @ is_right / counts.sum(1),
        "balanced_accuracy": mean_of_defined(ratio(true_positives, num_positive)),
        "f1": mean_of_defined(ratio(2 * true_positives, num_predicted + num_positive)),
        "calibration_error": _calibration_error(outputs.max(1), is_right, counts),
    }


def multilabel_metrics(scores: np.ndarray, positive: np.ndarray, counts: np.ndarray) -> Columns:
    """The same metrics of one label, predicted above 0.5. Shape: scores, positive (cases,)."""
    predicted = scores > THRESHOLD
    is_right = predicted == positive
    true_positives = counts @ (predicted & positive)
    num_predicted = counts @ predicted
    num_positive = counts @ positive
    sensitivity = ratio(counts @ (positive & is_right), num_positive)
    specificity = ratio(counts @ (~positive & is_right), counts @ ~positive)
    return {
        "auc": auc_of_samples(scores, positive, counts),
        "accuracy": ratio(counts @ is_right, counts.sum(1)),
        "balanced_accuracy": mean_of_defined(np.stack([sensitivity, specificity], 1)),
        "f1": ratio(2 * true_positives, num_predicted + num_positive),
        "calibration_error": _calibration_error(scores, positive, counts),
    }


def regression_metrics(output: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns:
    """`mae`, `rmse`, `r2` and `pearson` of one number. Shape: output, truth (cases,)."""
    total = counts.sum(1)
    errors = output - truth
    mean_squared_error = counts @ errors**2 / total
    # centred over all cases first, so that variances do not drown in rounding errors of large means
    x = output - output.mean()
    y = truth - truth.mean()
    mean_x = counts @ x / total
    mean_y = counts @ y / total
    covariance = counts @ (x * y) / total - mean_x * mean_y
    variance_x = _without_rounding_error(counts @ x**2 / total - mean_x**2, output, x)
    variance_y = _without_rounding_error(counts @ y**2 / total - mean_y**2, truth, y)
    correlation = ratio(covariance, np.sqrt(variance_x * variance_y))
    return {
        "mae": counts @ np.abs(errors) / total,
        "rmse": np.sqrt(mean_squared_error),
        "r2": 1 - ratio(mean_squared_error, variance_y),
        "pearson": correlation.clip(-1, 1),
    }


def _without_rounding_error(variance: np.ndarray, values: np.ndarray, centred: np.ndarray) -> np.ndarray:
    """The variance of each sample; 0 if it is only rounding error.

    Args: values: of all cases. centred: less their mean, whose squares the variance is a difference of.
    """
    smallest_std = _CONSTANT * np.abs(values).max()
    smallest = max(smallest_std**2, _CONSTANT * np.square(centred).max())
    return np.where(variance <= smallest, 0, variance)


def auc_of_samples(scores: np.ndarray, positive: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sort cases by score: a pair counts 1 if the negative has the lower score, 1/2 if both are equal.

    Shape: scores, positive (cases,), counts (samples, cases) -> (samples,).
    """
    if not len(scores):
        return np.full(len(counts), np.nan)
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    is_new_score = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    starts = np.flatnonzero(is_new_score)  # the first case of each distinct score
    # (samples, distinct scores)
    positives = np.add.reduceat(counts[:, order] * positive[order], starts, axis=1)
    negatives = np.add.reduceat(counts[:, order] * ~positive[order], starts, axis=1)
    lower_negatives = np.cumsum(negatives, axis=1) - negatives / 2
    ordered_pairs = (positives * lower_negatives).sum(1)
    return ratio(ordered_pairs, positives.sum(1) * negatives.sum(1))


def _calibration_error(probabilities: np.ndarray, right: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean over cases of |mean probability - share of correct predictions| of their bin."""
    # |sum of differences| of a bin is its number of cases times |difference of the means|
    membership = bin_membership(probabilities)
    differences = (right - probabilities)[:, None]
    bin_sums = counts @ (membership * differences)  # (samples, bins)
    return ratio(np.abs(bin_sums).sum(1), counts.sum(1))


def bin_membership(probabilities: np.ndarray) -> np.ndarray:
    """(cases,) -> (cases, 15), one-hot over bins of equal width; the last includes its upper edge."""
    # "right": a probability on an edge belongs to the bin above it
    edges = np.linspace(0, 1, BINS + 1)
    bin_index = np.searchsorted(edges, probabilities, side="right") - 1
    membership: np.ndarray = bin_index.clip(0, BINS - 1)[:, None] == np.arange(BINS)
    return membership.astype(float)


def ratio(numerator: np.ndarray | float, denominator: np.ndarray | float) -> np.ndarray:
    """numerator / denominator; NaN if the denominator is 0."""
    numerator = np.atleast_1d(numerator).astype(float)
    denominator = np.atleast_1d(denominator).astype(float)
    ratio: np.ndarray = np.full(np.broadcast(numerator, denominator).shape, np.nan)
    np.divide(numerator, denominator, out=ratio, where=denominator != 0)
    return ratio


def mean_of_defined(values: np.ndarray) -> np.ndarray:
    """Mean over the second axis, without NaN; (samples, names) -> (samples,)."""
    is_defined = ~np.isnan(values)
    sums = np.where(is_defined, values, 0).sum(1)
    return ratio(sums, is_defined.sum(1))


def intervals(
    targets: ScoredTargets, outputs: np.ndarray, truth: np.ndarray, samples: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """The 95 % confidence interval of each defined metric: percentiles over bootstrap samples of the cases.

    Samples in which a metric is undefined (no case of a rare class) are skipped. Needs at least two cases.
    """
    values = measure(targets, outputs, truth)
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
    values = measure(targets, outputs, truth)
    compared_values = measure(targets, compared_outputs, truth)
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
    outputs, truth = checked_arrays(targets, outputs, truth)
    if len(truth) < 2:
        samples = 0
    chunks = [
        sample_columns(targets, outputs, truth, counts)
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
