import numpy as np

from medconv.metrics import threshold_curves


def test_equal_scores_share_a_step_of_the_curve() -> None:
    """Scores 0.9 (with), 0.5 (one with and one without), 0.1 (without): two ways up, the middle one a
    slope.
    """
    false, true = threshold_curves.roc(np.array([0.1, 0.9, 0.5, 0.5]), np.array([False, True, True, False]))
    assert false.tolist() == [0, 0, 0.5, 1] and true.tolist() == [0, 0.5, 1, 1]


def test_precision_and_recall_of_equal_scores() -> None:
    """Scores 0.9 (with), 0.5 (one with and one without), 0.1 (without)."""
    scores = np.array([0.1, 0.9, 0.5, 0.5])
    precision, recall = threshold_curves.precision_recall(scores, np.array([False, True, True, False]))
    assert precision.tolist() == [1, 2 / 3, 0.5]
    assert recall.tolist() == [0.5, 1, 1]
