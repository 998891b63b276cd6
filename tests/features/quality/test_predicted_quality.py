"""medconv/features/quality/predicted_quality.py: the agreement of networks against the true Dice."""

import json

import numpy as np
import pytest
from helpers.label_maps import folders, label_of, with_names

from medconv.evaluation import segmentation
from medconv.evaluation.results import table
from medconv.features.quality.predicted_quality import compared
from medconv.features.quality.quality import read_calibration
from medconv.features.report.segmentation_report import page as page_of


def put(predictions, case, **dice):
    path = predictions / "quality" / f"{case}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"networks": 2, "classes": {name: {"dice": v} for name, v in dice.items()}}))


def test_predicted_and_true_dice_are_compared_per_class():
    """Three cases in another order by prediction than by truth; case d has no true Dice."""
    predicted = {"a": {"x": 0.9}, "b": {"x": 0.8}, "c": {"x": 0.5}, "d": {"x": 0.4}}
    true = {"a": {"x": 0.8}, "b": {"x": 0.9}, "c": {"x": 0.2}, "d": {"x": None}, "e": {"x": 1.0}}
    assert compared(predicted, true, ["x"]) == {
        "x": {
            "n": 3,
            "spearman": pytest.approx(0.5),
            "difference": pytest.approx(0.3 / 3),
            "mae": pytest.approx(0.5 / 3),
            "calibration": pytest.approx(list(np.polyfit([0.9, 0.8, 0.5], [0.8, 0.9, 0.2], 1))),
            "mae_calibrated": None,
        }
    }


def test_the_calibration_is_judged_on_cases_left_out():
    """The line through the other three cases meets the fourth, but for the last, and stays below 1; a line
    never falls."""
    dice = {"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.5}
    predicted = {case: {"x": value} for case, value in dice.items()}
    true = {case: {"x": 2 * value - 0.9} for case, value in dice.items()}
    row = compared(predicted, true, ["x"])["x"]
    assert row["calibration"] == pytest.approx([2, -0.9]) and row["mae_calibrated"] == pytest.approx(0)
    true["d"]["x"] = 0.0
    assert compared(predicted, true, ["x"])["x"]["mae_calibrated"] > 0.05
    upside_down = {case: {"x": 1 - value} for case, value in dice.items()}
    row = compared(predicted, upside_down, ["x"])["x"]
    assert row["calibration"] == pytest.approx([0, 1 - 2.9 / 4])


def test_too_few_or_constant_values_have_no_correlation():
    two = {"a": {"x": 0.1}, "b": {"x": 0.2}}
    assert compared(two, two, ["x"])["x"]["spearman"] is None
    constant = {case: {"x": 0.5} for case in "abc"}
    assert compared(constant, constant, ["x"])["x"] == {
        "n": 3,
        "spearman": None,
        "difference": 0.0,
        "mae": 0.0,
        "calibration": [0.0, 0.5],
        "mae_calibrated": None,
    }
    assert compared({"a": {"x": None}}, two, ["x"])["x"] == {
        "n": 0,
        "spearman": None,
        "difference": None,
        "mae": None,
        "calibration": None,
        "mae_calibrated": None,
    }


def test_evaluate_compares_where_predict_wrote_the_quality(tmp_path):
    """In the JSON, the table, and as a picture in the report; cases without quality do not count."""
    true_labels = {case: label_of(10, 5) for case in "abcd"}
    predicted = {case: label_of(10 - i, 5) for i, case in enumerate("abcd")}
    predictions, references = folders(tmp_path, predicted, true_labels)
    with_names(predictions, "background", "one", "two")
    assert "quality" not in segmentation.evaluate(predictions, references).result
    for case, dice in zip("abc", (1.0, 0.9, 0.7), strict=True):
        put(predictions, case, one=dice, two=None)
    evaluation = segmentation.evaluate(predictions, references)
    quality = evaluation.result["quality"]
    one = quality["per_class"]["one"]
    true = [1.0, 18 / 19, 16 / 18]
    assert (one["n"], one["spearman"]) == (3, pytest.approx(1.0))
    assert one["difference"] == pytest.approx((2.6 - sum(true)) / 3)
    assert quality["cases"]["b"] == {"one": 0.9, "two": None}
    assert json.loads(json.dumps(evaluation.result)) == evaluation.result
    lines = table(evaluation).splitlines()
    assert lines[-2] == (
        f"one: predicted minus true Dice {one['difference']:.4f}, Spearman 1.0000 in 3 cases; calibrated, by too few cases to say how far it is off"
    )
    assert (
        lines[-1] == "two: predicted minus true Dice -, Spearman - in 0 cases; not calibrated: too few cases"
    )
    metrics = tmp_path / "metrics.json"
    metrics.write_text(json.dumps(evaluation.result))
    line = read_calibration(metrics, ["one", "two"])
    assert line == {"one": pytest.approx(tuple(np.polyfit([1.0, 0.9, 0.7], true, 1))), "two": None}
    assert "Predicted against true Dice" in page_of(evaluation)
    by_pattern = segmentation.evaluate(predictions / "{id}.nii.gz", references)
    assert by_pattern.result["quality"] == quality and quality["method"] == "pairwise_dice"
    with pytest.raises(ValueError, match="its calibration is of pairwise_dice, these predictions have soft_"):
        read_calibration(metrics, ["one", "two"], "soft_dice_confidence")
    path = predictions / "quality/a.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "method": "soft_dice_confidence"}))
    with pytest.raises(ValueError, match="some cases have pairwise_dice, the others soft_dice_confidence"):
        segmentation.evaluate(predictions, references)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"classes": {"1": {}}}',
        '{"classes": {"1": {"dice": "high"}}}',
        '{"classes": {"1": {"dice": 7}}}',
    ],
)
def test_other_files_are_refused(tmp_path, content):
    labels = {"a": label_of(5)}
    predictions, references = folders(tmp_path, labels, labels)
    put(predictions, "a")
    (predictions / "quality/a.json").write_text(content)
    with pytest.raises(
        ValueError, match=rf"^{predictions}/quality/a\.json: expected the quality of a case as"
    ):
        segmentation.evaluate(predictions, references)
