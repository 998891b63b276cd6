"""medconv/targets/image_level_scores.py: scores over the cases of all folds, and their means over folds."""

import pytest

from medconv.targets.base import all_kinds
from medconv.targets.image_level_scores import ImageLevelScoredTargets
from medconv.targets.multiclass import MulticlassTargets
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


def test_only_classes_and_labels_are_calibrated() -> None:
    calibrated = [name for name, kind in all_kinds().items() if kind.calibrated]
    assert sorted(calibrated) == ["multiclass", "multilabel"]
    assert all(issubclass(all_kinds()[name], ImageLevelScoredTargets) for name in calibrated)
    rows = {"a": {"outputs": [float("nan")], "values": [40.0]}}
    assert AGE.temperature(rows) is None


def test_the_summary_of_a_classifier_has_its_monitored_metric_and_a_table_of_folds_has_not() -> None:
    targets = MulticlassTargets(("a", "b"))
    rows = {"x": {"outputs": [0.9, 0.1], "values": [0.0]}, "y": {"outputs": [0.4, 0.6], "values": [1.0]}}
    summary = targets.summary(rows)
    assert summary["cross_entropy"] == pytest.approx(0.3081, abs=1e-4)
    assert summary["cross_entropy"] == targets.logged(rows, {})["cross_entropy"]
    columns = [name for name, _ in targets.score_columns(summary)]
    lines = targets.over_folds_lines(targets.over_folds([rows]), cases=2)
    assert columns == list(targets.metric_names) and len(lines[0][1]) == len(columns)
