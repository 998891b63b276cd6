"""medconv/features/image_level/tables.py: tables of predictions and labels, and mistakes in them."""

import json

import numpy as np
import pytest
from helpers.image_level_tables import write_table, write_tables

from medconv.cli.preprocess_report import table
from medconv.data.case import Case, Dataset
from medconv.data.preprocessing.examine import CaseReport
from medconv.features.image_level import tables
from medconv.features.image_level.evaluation import evaluate
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.multilabel import MultilabelTargets
from medconv.features.image_level.output import OutputTable
from medconv.features.image_level.regression import RegressionTargets
from medconv.targets.label_map import LabelMapTargets


@pytest.mark.parametrize("kind", [MulticlassTargets, MultilabelTargets])
def test_classes_named_like_columns_are_read_back(tmp_path, kind):
    """`predict` renames columns of classes that are called `case` or `predicted`."""
    targets = kind(("case", "control", "predicted"))
    outputs = np.array([[0.2, 0.7, 0.1], [0.5, 0.3, 0.2]])
    folder = OutputTable(tmp_path, targets, {}, {})
    (tmp_path / "a.png").touch()
    cases = [Case(name, (tmp_path / "a.png",)) for name in ("x", "y")]
    with folder.open(cases):
        for case, values in zip(cases, outputs, strict=True):
            folder.add(case, values)
    table = tables.read_predictions(tmp_path / "predictions.csv", "predictions")
    assert table.targets == targets and list(table.outputs) == ["x", "y"]
    np.testing.assert_allclose(np.stack(list(table.outputs.values())), outputs)
    if kind is MultilabelTargets:
        labels = write_table(
            tmp_path / "l.csv", ["path", *targets.names], ["x.png", 1, 0, 0], ["y.png", 1, 1, 0]
        )
        assert tables.read_truth(labels, targets).values == {"x": (1, 0, 0), "y": (1, 1, 0)}


def test_a_case_of_which_some_findings_are_known_is_evaluated(tmp_path):
    predictions = write_table(
        tmp_path / "p.csv", ["case", "x", "y"], *[[f"{i}", 0.1 * i, 1 - 0.2 * i] for i in range(5)]
    )
    labels = write_table(
        tmp_path / "l.csv", ["case", "x", "y"], [0, 0, ""], [1, "NA", 1], [2, 1, -1], [3, -1, ""], [4, 1, 0]
    )
    result = evaluate(predictions, labels).result
    assert result["targets"]["kind"] == "multilabel"
    assert result["without_label"] == ["3"]
    assert [row["truth"] for row in result["cases"]] == [[0, None], [None, 1], [1, None], [1, 0]]
    assert result["mean"]["auc"] == 1
    assert "NaN" not in json.dumps(result)


def test_ids_and_classes_that_look_like_formulas_are_read_back(tmp_path):
    targets = MulticlassTargets(("=cmd", "-low"))
    (tmp_path / "a.png").touch()
    cases = [Case(name, (tmp_path / "a.png",)) for name in ("=1+1", "@x", "-7", "+plus")]
    for _ in range(2):  # the second reads the table of the first
        folder = OutputTable(tmp_path, targets, {}, {})
        with folder.open(cases):
            for case in cases[: 4 if not folder.skipped else 0]:
                folder.add(case, np.array([0.25, 0.75]))
        assert [*folder.skipped] in ([], [case.id for case in cases])
        lines = (tmp_path / "predictions.csv").read_text().splitlines()
        assert lines == ["case,predicted,'=cmd,'-low"] + [
            f"{case},'-low,0.25,0.75" for case in ("'=1+1", "'@x", "-7", "'+plus")
        ]
    table = tables.read_predictions(tmp_path / "predictions.csv", "predictions")
    assert table.targets == targets
    assert list(table.outputs) == ["=1+1", "@x", "-7", "+plus"]


def test_a_class_that_is_not_the_most_probable_one_is_doubted(tmp_path, caplog):
    rows = [["c0", "cat", 0.2, 0.8], ["c1", "dog", 0.2, 0.8], ["c2", "dog", 0.5, 0.5]]
    path = write_table(tmp_path / "predictions.csv", HEADER, *rows)
    tables.read_predictions(path, "predictions")
    assert "is not the most probable one in 1 of 3 rows; the scores are those" in caplog.text
    assert caplog.text.rstrip().endswith("class: c0")


def test_words_for_no_value_are_no_label_unless_they_are_a_class(tmp_path):
    labels = write_table(tmp_path / "l.csv", ["case", "label"], ["x", "a"], ["y", "NA"], ["z", "None"])
    truth = tables.read_truth(labels, MulticlassTargets(("a", "None")))
    assert truth.values == {"x": (0,), "z": (1,)}
    assert truth.unlabelled == ("y",)


HEADER = ["case", "predicted", "cat", "dog"]
RECORD = '{"targets": {"kind": "multiclass", "names": ["a", "b"]}}'
FAULTS = {
    r"predictions .*predictions.csv: no such file, expected a table \(CSV\)": lambda p, q: p.unlink(),
    "no column 'case', expected a table as medconv predict writes it": lambda p, q: write_table(
        p, ["name", "x"], ["a", 1]
    ),
    "row 2: column 'dog' must hold a finite number, got 'high'": lambda p, q: write_table(
        p, HEADER, ["c0", "cat", 1, "high"]
    ),
    "row 2: expected probabilities, from 0 to 1": lambda p, q: write_table(p, HEADER, ["c0", "cat", 1.5, 0]),
    "row 3: case c0 is there twice": lambda p, q: write_table(p, HEADER, *[["c0", "cat", 1, 0]] * 2),
    "labels.csv, row 2: column 'label': 'mouse' is not a class; the classes are cat": lambda p, q: (
        write_table(q, ["path", "label"], ["c0.png", "mouse"])
    ),
    "no column 'label'; it has path, kind": lambda p, q: write_table(q, ["path", "kind"], ["c0.png", "cat"]),
    "a column 'case' or 'path' is needed": lambda p, q: write_table(q, ["label"], ["cat"]),
    "no row for c1, c2, c3": lambda p, q: write_table(q, ["path", "label"], ["c0.png", "cat"]),
    "none of the cases of .*predictions.csv, such as c0": lambda p, q: write_table(
        q, ["path", "label"], ["other.png", "cat"]
    ),
    "its columns are cat, .*, but prediction.json beside it has a, b": lambda p, q: p.with_name(
        "prediction.json"
    ).write_text(RECORD),
}


@pytest.mark.parametrize("message", FAULTS)
def test_faulty_tables_are_refused_with_the_row(tmp_path, message):
    predictions, labels, _, _ = write_tables(tmp_path)
    FAULTS[message](predictions, labels)
    with pytest.raises(ValueError, match=message):
        evaluate(predictions, labels)


def test_a_split_without_rows_is_refused(tmp_path):
    predictions, labels, _, _ = write_tables(tmp_path)
    with pytest.raises(ValueError, match="no row whose column 'split' is val"):
        evaluate(predictions, labels, split="val")
    with pytest.raises(ValueError, match="no column 'fold'; it has path, label, split"):
        evaluate(predictions, labels, split="val", split_column="fold")


def test_a_table_beside_label_maps_says_itself_what_it_holds(tmp_path):
    predictions, *_ = write_tables(tmp_path)
    manifest = tmp_path / "prediction.json"
    manifest.write_text(json.dumps({"targets": LabelMapTargets.of_classes(["rest", "a"]).plain()}))
    assert tables.read_predictions(predictions, "predictions").targets.kind == "multiclass"
    manifest.write_text(json.dumps({"targets": {"kind": "regression", "names": ["a"], "means": 5}}))
    with pytest.raises(ValueError, match=rf"^{manifest}: expected a list"):
        tables.read_predictions(predictions, "predictions")


@pytest.mark.parametrize(
    ("targets", "labels", "cells"),
    [
        (MulticlassTargets(("normal", "tumour")), (1.0,), ["", "x"]),
        (RegressionTargets(("age",)), (41.5,), ["41.5"]),
    ],
)
def test_the_table_has_a_column_for_each_image_level_target(targets, labels, cells):
    """A case without a label has dashes."""
    names = targets.names
    cases = (Case("a", (), values=labels), Case("b", ()))
    lines = table(
        Dataset("d", cases, names, ("MRI",), targets=targets), [CaseReport("a"), CaseReport("b", ["no file"])]
    ).splitlines()
    starts = [lines[0].index(name) for name in names]
    shown = [[line[start:].split("  ")[0].strip() for start in starts] for line in lines[1:]]
    assert shown == [cells, ["-"] * len(names)]
    assert lines[2].endswith("1 error") and not lines[1].endswith("error")
