"""medconv/targets/image_level_scores.py: scores over the cases of all folds, and their means over folds."""

import pytest

from medconv.targets.regression import RegressionTargets

AGE = RegressionTargets(("age",))
FOLDS = [
    {"a": {"outputs": [41.0], "values": [40.0]}, "b": {"outputs": [50.0], "values": [52.0]}},
    {"c": {"outputs": [66.0], "values": [60.0]}},
]


def test_folds_are_scored_together_and_by_their_means() -> None:
    scores = AGE.over_folds(FOLDS)
    assert scores["mean"]["mae"] == pytest.approx((1 + 2 + 6) / 3)
    assert scores["mean_of_folds"]["mae"] == pytest.approx((1.5 + 6) / 2)
    lines = dict(AGE.over_folds_lines(scores, cases=3))
    assert list(lines) == ["all cases", "mean of folds", "95 % from", "95 % to"]
    low, high = scores["intervals"]["mae"]
    assert (lines["95 % from"][0], lines["95 % to"][0]) == (low, high)


def test_cells_of_a_case_name_truth_and_output() -> None:
    assert AGE.case_cells(FOLDS[0]["a"]) == {"truth/age": 40.0, "output/age": 41.0}
