"""Metrics of image-level predictions (classification, regression), of all cases or of samples of them."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from medconv.metrics.segmentation import MetricValues
from medconv.metrics.weighted import Columns, auc_of_samples, bin_membership, mean_of_defined, ratio

_SMALLEST_PROBABILITY = 1e-7  # so that its logarithm is finite


class ScoredTargets(Protocol):
    """What the functions below need to know of image-level targets; `targets/` implements it."""

    @property
    def metric_names(self) -> tuple[str, ...]: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def num_values(self) -> int: ...

    def columns(self, outputs: np.ndarray, truth: np.ndarray, counts: np.ndarray) -> Columns: ...


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
    is_finite = np.isfinite(outputs).all() and np.isfinite(truth).all()
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
