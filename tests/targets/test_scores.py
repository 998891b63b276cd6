"""medconv/targets/scores.py: Dice of names that a case is annotated for, and the spread over cases."""

import numpy as np
import pytest

from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets
from medconv.targets.scores import DICE, MAE, metric_of_summary, spread_text

CLASSES = LabelMapTargets.of_classes(["background", "a", "b"])
REGIONS = RegionTargets(("lesion", "core"), ((1, 2), (2,)), None, (1, 2))


def test_dice_of_a_class_that_is_not_annotated_is_undefined():
    prediction, reference = np.array([1, 1, 2, 0]), np.array([0, 1, 2, 2])
    assert CLASSES.dice(prediction, reference) == {"a": pytest.approx(2 / 3), "b": pytest.approx(2 / 3)}
    assert CLASSES.dice(prediction, reference, (True, False, True)) == {"a": None, "b": pytest.approx(2 / 3)}
    row = REGIONS.dice(prediction, reference, REGIONS.annotated_outputs((2,)))
    assert row == {"lesion": None, "core": pytest.approx(2 / 3)}


def test_the_worst_cases_are_named_beside_the_spread():
    rows = {case: {"a": value, "b": 0.5} for case, value in zip("wxyz", (0.9, 0.1, 0.7, 0.5), strict=True)}
    scores = CLASSES.scores.case_scores({**rows, "empty": {"a": None, "b": None}})
    # of 0.7, 0.3, 0.6 and 0.5: the root of 0.0875 / 3
    assert spread_text(scores) == "over cases: sd 0.1708, worst x 0.3000, z 0.5000, y 0.6000"
    assert spread_text({"a": 0.1, "b": 0.2, "c": 0.3, "d": None}) == ""


def test_a_larger_quality_is_better_in_either_direction():
    assert DICE.quality(0.9) > DICE.quality(0.8)
    assert MAE.quality(1) > MAE.quality(2)
    assert (DICE.mode, MAE.mode) == ("max", "min")


def test_the_summary_of_a_run_names_its_metric():
    assert metric_of_summary({"score": MAE.plain()}) == MAE


def test_dice_is_the_metric_where_none_is_named():
    assert metric_of_summary({}) == metric_of_summary({"score": "x"}) == DICE
