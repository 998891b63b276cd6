"""medconv/evaluation/segmentation_results.py: statistics per class, and comparison of two networks."""

import csv

import pytest
from helpers.label_maps import folders, label_of, save_spaced

from medconv.evaluation import segmentation
from medconv.evaluation.results import table, write


def evaluate(*arguments, **options):
    """The content of the JSON file."""
    return segmentation.evaluate(*arguments, **options).result


def dices(result):
    return {name: values["dice"] for name, values in result["per_class"].items()}


def test_two_sets_of_predictions_are_compared_case_by_case(tmp_path):
    """Case c is in one set only; b's class 2 has no Dice in the first, so it is compared nowhere."""
    true_labels = {name: label_of(10, 5) for name in "ac"} | {"b": label_of(10)}
    predictions, references = folders(
        tmp_path, {"a": label_of(10, 5), "b": label_of(8), "c": label_of(1)}, true_labels
    )
    for name, label in {"a": label_of(5, 5), "b": label_of(4, 3)}.items():
        save_spaced(tmp_path / "other" / f"{name}.nii.gz", label)
    evaluation = segmentation.evaluate(predictions, references, tmp_path / "other")
    result = evaluation.result
    one, two = (result["comparison"][name]["dice"] for name in "12")
    assert (one["n"], two["n"]) == (2, 1)
    assert one["difference"] == pytest.approx((1 - 10 / 15 + 16 / 18 - 8 / 14) / 2)
    assert one["p"] == 0.5 and one["p_holm"] == 1.0
    assert result["comparison"]["1"]["volume_error_ml"]["mean_compare"] == pytest.approx(
        (5 + 6) / 2 * 6 / 1000
    )
    assert [row["case"] for row in result["compare"]["cases"]] == ["a", "b"]
    assert result["compare"]["predictions"] == str(tmp_path / "other")
    assert "1: Dice, predictions minus compare: 0.3254 in 2 cases, p 1.0000 (Wilcoxon, Holm)" in table(
        evaluation
    )
    write(evaluation, tmp_path / "metrics.json")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [row["predictions"] for row in csv.DictReader(file)] == [str(predictions)] * 6 + [
            str(tmp_path / "other")
        ] * 4


def test_sets_without_a_common_case_are_refused(tmp_path):
    predictions, references = folders(tmp_path, {"a": label_of(3)}, {"a": label_of(3), "b": label_of(4)})
    save_spaced(tmp_path / "other/b.nii.gz", label_of(3))
    with pytest.raises(ValueError, match=rf"compare {tmp_path}/other: no case in common with {predictions}"):
        evaluate(predictions, references, tmp_path / "other")


def test_without_names_the_classes_are_those_of_all_cases(tmp_path):
    """A class that a case does not have is undefined there."""
    labels = {"a": label_of(3), "b": label_of(3, 3)}
    result = evaluate(*folders(tmp_path, labels, labels))
    assert result["cases"][0]["dice"] == {"1": 1.0, "2": None}
    assert dices(result) == {"1": 1.0, "2": 1.0}
