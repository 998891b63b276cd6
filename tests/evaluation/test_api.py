"""medconv/evaluation/api.py: arrays or files in, a table out."""

import csv

import pytest
from helpers.label_maps import folders, label_of

import medconv
from medconv.evaluation import segmentation
from medconv.evaluation.results import write

LABELS = {"a": label_of(10, 20), "b": label_of(5, 6)}
REFERENCES = {"a": label_of(12, 16), "b": label_of(5, 6)}


def test_arrays_and_folders_give_the_same_table(tmp_path):
    predictions, references = folders(tmp_path, LABELS, REFERENCES)
    of_files = medconv.evaluate(predictions, str(references), tolerance_mm=2, lesion_iou=0.5)
    scores = medconv.evaluate(LABELS, REFERENCES, spacing_mm=(1, 2, 3), tolerance_mm=2, lesion_iou=0.5)
    assert scores.mean == of_files.mean and scores.per_class == of_files.per_class
    rows = [{key: row[key] for key in row if key != "predictions"} for row in of_files.rows]
    assert scores.rows == rows
    assert [(row["case"], row["class"]) for row in rows] == [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2")]


def test_the_rows_are_those_of_the_command(tmp_path):
    paths = folders(tmp_path, LABELS, REFERENCES)
    write(segmentation.evaluate(*paths), tmp_path / "metrics.json")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    rows = medconv.evaluate(*paths).rows
    assert [{key: str(value) for key, value in row.items()} for row in rows] == written


def test_classes_have_names_and_tolerances_of_their_own():
    scores = medconv.evaluate(
        LABELS["a"],
        REFERENCES["a"],
        spacing_mm=(1, 2, 3),
        targets=["background", "organ", "lesion"],
        tolerance_mm={"lesion": 5},
    )
    assert list(scores.per_class) == ["organ", "lesion"]
    with pytest.raises(ValueError, match="no class 'liver'"):
        medconv.evaluate(LABELS, REFERENCES, spacing_mm=(1, 2, 3), tolerance_mm={"liver": 5})


@pytest.mark.parametrize(
    "options, error",
    [
        ({}, "spacing_mm is needed for arrays"),
        ({"references": "labels"}, "must both be files, or both be arrays"),
        ({"predictions": "out", "references": "labels", "spacing_mm": (1, 2, 3)}, "files have their own"),
        ({"spacing_mm": (1, 2, 3), "lesion_iou": 0}, "lesion_iou must be above 0"),
        ({"spacing_mm": (1, 2, 3), "tolerance_mm": -1}, "tolerance_mm -1: expected millimetres"),
    ],
)
def test_options_that_do_not_fit_each_other(options, error):
    arguments = {"predictions": LABELS, "references": REFERENCES, **options}
    with pytest.raises(ValueError, match=error):
        medconv.evaluate(arguments.pop("predictions"), arguments.pop("references"), **arguments)
