"""The points of ROC and precision-recall curves: a point for each distinct score.

Shape: scores (cases,), positive (cases,) bool -> two arrays (points,).
"""

import numpy as np


def roc(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rate at each threshold, from the highest; equal scores share a threshold."""
    false_positives, true_positives = _positives(scores, positive)
    false_positives = np.concatenate([[0], false_positives])
    true_positives = np.concatenate([[0], true_positives])
    return false_positives / false_positives[-1], true_positives / true_positives[-1]


def precision_recall(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Precision and recall at each threshold, from the highest; equal scores share a threshold."""
    false_positives, true_positives = _positives(scores, positive)
    precision = true_positives / (true_positives + false_positives)
    return precision, true_positives / true_positives[-1]


def _positives(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of false and true positives at each distinct score, from the highest."""
    order = np.argsort(-scores, kind="stable")
    # cases of equal scores are on the same side of every threshold
    is_last_of_score = np.append(np.diff(scores[order]) != 0, True)
    ends = np.flatnonzero(is_last_of_score)
    return np.cumsum(~positive[order])[ends], np.cumsum(positive[order])[ends]
