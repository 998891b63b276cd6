"""medconv/targets/scores.py: direction and origin of the metric that ranks runs."""

from medconv.targets.scores import DICE, MAE, metric_of_summary


def test_a_larger_quality_is_better_in_either_direction():
    assert DICE.quality(0.9) > DICE.quality(0.8)
    assert MAE.quality(1) > MAE.quality(2)
    assert (DICE.mode, MAE.mode) == ("max", "min")


def test_the_summary_of_a_run_names_its_metric():
    assert metric_of_summary({"score": MAE.plain()}) == MAE


def test_dice_is_the_metric_where_none_is_named():
    assert metric_of_summary({}) == metric_of_summary({"score": "x"}) == DICE
