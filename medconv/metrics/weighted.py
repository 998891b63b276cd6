"""Metrics of image-level predictions as functions of weights of cases.

A weight is 1, or how often a bootstrap sample drew the case. So a thousand samples are a few matrix products,
and a metric and its interval (`bootstrap`) come from the same code.
"""

import numpy as np

BINS = 15  # of the calibration error
THRESHOLD = 0.5  # multilabel: a label with a probability above it is predicted
OF_CLASSES = ("auc", "accuracy", "balanced_accuracy", "f1", "calibration_error")
OF_NUMBERS = ("mae", "rmse", "r2", "pearson")
_CONSTANT = 1e-12  # a spread below this share of the largest value is rounding error
Columns = dict[str, np.ndarray]  # metric to one value for each sample


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
        "accuracy": counts @ is_right / counts.sum(1),
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
    variance_x = _without_rounding_error(counts @ x**2 / total - mean_x**2, output)
    variance_y = _without_rounding_error(counts @ y**2 / total - mean_y**2, truth)
    correlation = ratio(covariance, np.sqrt(variance_x * variance_y))
    return {
        "mae": counts @ np.abs(errors) / total,
        "rmse": np.sqrt(mean_squared_error),
        "r2": 1 - ratio(mean_squared_error, variance_y),
        "pearson": correlation.clip(-1, 1),
    }


def _without_rounding_error(variance: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The variance; 0 if it is only rounding error."""
    smallest_std = _CONSTANT * np.abs(values).max()
    return np.where(variance <= smallest_std**2, 0, variance)


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
    errors: np.ndarray = np.abs(bin_sums).sum(1) / counts.sum(1)
    return errors


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
