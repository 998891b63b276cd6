"""medconv/evaluation/segmentation_results.py: the table, the CSV file, and two sets of predictions."""

import csv
import json

import nibabel as nib
import numpy as np
import pytest
from helpers.label_maps import folders, label_of, save_spaced, with_names

from medconv.evaluation import segmentation
from medconv.evaluation.results import table, write


def test_the_csv_has_a_row_per_case_and_class_the_table_one_per_class(tmp_path):
    predicted, true_labels = {"b": label_of(4, 2), "a": label_of(4)}, {"a": label_of(4), "b": label_of(4)}
    predictions, references = folders(tmp_path, predicted, true_labels)
    with_names(predictions, "background", "liver", "tumour, left")
    evaluation = segmentation.evaluate(predictions, references)
    write(evaluation, tmp_path / "metrics.json")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0][:5] == ["predictions", "case", "class", "dice", "nsd"]
    assert [row[1:5] for row in rows[1:]] == [
        ["a", "liver", "1.0", "1.0"],
        ["a", "tumour, left", "", ""],
        ["b", "liver", "1.0", "1.0"],
        ["b", "tumour, left", "0.0", "0.0"],
    ]
    assert {len(row) for row in rows} == {len(rows[0])} and rows[1][0] == str(predictions)
    lines = [line.split() for line in table(evaluation).splitlines()]
    assert lines[1] == ["liver", "1.0000", "0.0000", "1.0000", "0.00", "0.00", "0.0", "2"]
    assert lines[2] == ["tumour,", "left", "0.0000", "-", "0.0000", "16.73", "16.73", "-", "1"]
    assert lines[3] == ["mean", "foreground", "0.5000", "-", "0.5000", "8.37", "8.37", "0.0"]


def test_the_table_names_the_worst_cases(tmp_path):
    predicted = {"a": label_of(4), "b": label_of(6), "c": label_of(2), "d": label_of(4)}
    evaluation = segmentation.evaluate(*folders(tmp_path, predicted, dict.fromkeys("abcd", label_of(4))))
    line = table(evaluation).splitlines()[-1]
    assert line == "Dice over cases: sd 0.1633, worst c 0.6667, b 0.8000, a 1.0000"


def test_volume_errors_are_in_per_cent_in_the_table(tmp_path):
    evaluation = segmentation.evaluate(*folders(tmp_path, {"a": label_of(6)}, {"a": label_of(4)}))
    assert evaluation.result["mean"]["volume_error"] == 0.5
    _, row, mean = (line.split() for line in table(evaluation).splitlines())
    assert row[-2:] == ["50.0", "1"] and mean[-1] == "50.0"


def test_distances_in_microscopy_are_not_rounded_to_0(tmp_path):
    paths = folders(tmp_path, {"a": label_of(6)}, {"a": label_of(4)})
    for path in (paths[0] / "a.nii.gz", paths[1] / "a.nii.gz"):
        array = np.asarray(nib.load(path).dataobj)
        nib.save(nib.Nifti1Image(array, np.diag([3e-4, 3e-4, 3e-4, 1])), path)
    evaluation = segmentation.evaluate(*paths)
    hd95_mm = evaluation.result["mean"]["hd95_mm"]
    _, row, _ = (line.split() for line in table(evaluation).splitlines())
    assert hd95_mm < 0.01 and float(row[4]) == pytest.approx(hd95_mm, rel=0.05)


def test_dice_of_empty_label_maps_is_undefined(tmp_path):
    evaluation = segmentation.evaluate(*folders(tmp_path, {"a": label_of()}, {"a": label_of()}))
    result = evaluation.result
    assert result["mean"]["dice"] is None
    write(evaluation, tmp_path / "metrics.json")
    assert json.loads((tmp_path / "metrics.json").read_text())["mean"]["dice"] is None
    assert table(evaluation).splitlines()[-1].split() == ["mean", "foreground", *"------"]


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
    volumes = result["comparison"]["1"]["volume_error_ml"]  # without their signs
    assert volumes["mean"] == pytest.approx((0 + 2) / 2 * 6 / 1000)
    assert volumes["mean_compare"] == pytest.approx((5 + 6) / 2 * 6 / 1000)
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
