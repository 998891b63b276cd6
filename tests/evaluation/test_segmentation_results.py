"""medconv/evaluation/segmentation_results.py: rows of the CSV, and lines of the table."""

import csv
import json

from helpers.label_maps import folders, label_of, with_names

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


def test_dice_of_empty_label_maps_is_undefined(tmp_path):
    evaluation = segmentation.evaluate(*folders(tmp_path, {"a": label_of()}, {"a": label_of()}))
    result = evaluation.result
    assert result["mean"]["dice"] is None
    write(evaluation, tmp_path / "metrics.json")
    assert json.loads((tmp_path / "metrics.json").read_text())["mean"]["dice"] is None
    assert table(evaluation).splitlines()[-1].split() == ["mean", "foreground", *"------"]
