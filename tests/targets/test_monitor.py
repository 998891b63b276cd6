"""medconv/targets/monitor.py: direction and origin of the metric that ranks runs."""

from medconv.targets import monitor


def test_a_larger_quality_is_better_in_either_direction() -> None:
    assert monitor.DICE.quality(0.9) > monitor.DICE.quality(0.8)
    assert monitor.MAE.quality(1) > monitor.MAE.quality(2)
    assert (monitor.DICE.mode, monitor.MAE.mode) == ("max", "min")


def test_the_summary_of_a_run_names_its_metric() -> None:
    assert monitor.metric_of_summary({"score": monitor.MAE.plain()}) == monitor.MAE


def test_dice_is_the_metric_where_none_is_named() -> None:
    assert monitor.metric_of_summary({}) == monitor.metric_of_summary({"score": "x"}) == monitor.DICE
