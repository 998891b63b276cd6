"""medconv/features/image_level/evaluation.py and report.py: scores from tables, and their page."""

import json
import re

import numpy as np
import pytest
from helpers import image_level_tables
from helpers.image_level_tables import CLASSES, NASTY, write_table, write_tables
from PIL import Image

import medconv
from medconv.evaluation.results import table
from medconv.features.image_level import metrics
from medconv.features.image_level.evaluation import evaluate
from medconv.features.image_level.evaluation import evaluate as evaluate_table
from medconv.features.image_level.evaluation import page as page_of
from medconv.features.image_level.multiclass import OrdinalTargets
from medconv.features.image_level.regression import RegressionTargets
from medconv.features.joint.targets import JointTargets


def test_scores_are_those_of_the_metrics(tmp_path):
    predictions, labels, outputs, truth = write_tables(tmp_path)
    result = evaluate(predictions, labels).result
    assert result["mean"] == metrics.measure(CLASSES, outputs, truth)
    assert result["intervals"]["auc"] == list(metrics.intervals(CLASSES, outputs, truth)["auc"])
    assert result["per_class"] == CLASSES.per_name(outputs, truth)
    part = evaluate(predictions, labels, split="test").result
    assert (
        part["mean"] == metrics.measure(CLASSES, outputs[4:], truth[4:]) and part["cases"][0]["case"] == "c4"
    )
    json.dumps(result, allow_nan=False)


def test_without_a_manifest_the_labels_decide_the_kind_of_targets(tmp_path):
    predictions = write_table(
        tmp_path / "p.csv", ["case", "a", "b"], ["x", 0.2, 0.9], ["y", 0.8, 0.1], ["z", 0.5, 0.6]
    )
    findings = write_table(tmp_path / "f.csv", ["case", "a", "b"], ["x", 0, 1], ["y", 1, 0], ["z", 1, 1])
    numbers = write_table(tmp_path / "n.csv", ["case", "a", "b"], ["x", 0.3, 1], ["y", 1, 0], ["z", 1, 1])
    assert evaluate(predictions, findings).result["targets"]["kind"] == "multilabel"
    evaluation = evaluate(predictions, numbers)
    result = evaluation.result
    assert result["targets"]["kind"] == "regression"
    assert result["mean"]["mae"] == pytest.approx(np.mean([0.1, 0.1, 0.2, 0.1, 0.5, 0.4]))
    assert "mean absolute error" in table(evaluation) and "R2" in page_of(evaluation)


def test_columns_of_labels_are_paired_by_name(tmp_path):
    predictions = write_table(tmp_path / "p.csv", ["case", "a", "b"], ["x", 0.2, 0.9], ["y", 0.8, 0.1])
    labels = write_table(tmp_path / "l.csv", ["case", "a", "b", "c"], ["x", 0, 1, 1], ["y", 1, 0, 0])
    for columns in (("a", "b"), ("b", "a")):
        assert evaluate(predictions, labels, label_columns=columns).result["mean"]["accuracy"] == 1
    assert evaluate(predictions, labels, label_columns=("a", "c")).result["mean"]["accuracy"] == 1
    with pytest.raises(ValueError, match="label columns: a would be compared with the predictions of b"):
        evaluate(predictions, labels, label_columns=("c", "a"))


def test_cases_without_a_label_are_named_and_not_counted(tmp_path):
    predictions = write_table(
        tmp_path / "p.csv", ["case", "a", "b"], ["x", 0.2, 0.9], ["y", 0.8, 0.1], ["z", 0.8, 0.1]
    )
    labels = write_table(
        tmp_path / "l.csv", ["case", "a", "b"], ["x", 0, 1], ["y", 1, 0], ["z", "", "NA"], ["w", "nan", 1]
    )
    evaluation = evaluate(predictions, labels)
    assert evaluation.result["targets"]["kind"] == "multilabel"
    assert evaluation.result["without_label"] == ["z"] and len(evaluation.result["cases"]) == 2
    assert "1 of 3 cases have no label and are not counted: z" in table(evaluation)
    (tmp_path / "l.csv").write_text("case,a,b\nx,,\n")
    with pytest.raises(ValueError, match=r"l\.csv: no row with a label"):
        evaluate(predictions, labels)


def test_a_comparison_is_over_the_cases_of_both(tmp_path):
    predictions, labels, outputs, truth = write_tables(tmp_path)
    others = np.array([[0.5, 0.5], [0.9, 0.1], [0.3, 0.7], [0.6, 0.4], [0.2, 0.8]])
    rows = [[f"c{i}", "cat", *o] for i, o in enumerate(others)]
    second = write_table(tmp_path / "other.csv", ["case", "predicted", *CLASSES.names], *rows)
    evaluation = evaluate(predictions, labels, second)
    result = evaluation.result
    assert result["comparison"] == metrics.paired(CLASSES, outputs[:5], others, truth[:5])
    assert result["compare"]["cases"] == 5 and "5 cases that both have" in page_of(evaluation)


def test_only_predictions_of_one_kind_are_compared(tmp_path):
    predictions = write_table(tmp_path / "p.csv", ["case", "a", "b"], ["x", 0.2, 0.9], ["y", 0.8, 0.1])
    labels = write_table(tmp_path / "l.csv", ["case", "a", "b"], ["x", 0, 1], ["y", 1, 0])
    logits = write_table(tmp_path / "logits.csv", ["case", "a", "b"], ["x", -3.0, 2.0], ["y", 1.0, 0.1])
    with pytest.raises(ValueError, match=r"compare .*logits\.csv, row 2: expected probabilities"):
        evaluate(predictions, labels, logits)
    (tmp_path / "other").mkdir()
    numbers = write_table(tmp_path / "other/p.csv", ["case", "a", "b"], ["x", 0.1, 0.2], ["y", 0.3, 0.1])
    targets = RegressionTargets(("a", "b"), means=(0.0, 0.0), stds=(1.0, 1.0))
    (tmp_path / "other/prediction.json").write_text(json.dumps({"targets": targets.plain()}))
    with pytest.raises(ValueError, match="compare .*is regression, expected multilabel"):
        evaluate(predictions, labels, numbers)


def test_grades_are_compared_with_classes(tmp_path):
    """Both are probabilities of classes; a table without a manifest does not say which."""
    rows = [["x", "a", 0.9, 0.1], ["y", "b", 0.2, 0.8]]
    (tmp_path / "graded").mkdir()
    graded = write_table(tmp_path / "graded/p.csv", ["case", "predicted", "a", "b"], *rows)
    plain = OrdinalTargets(("a", "b")).plain()
    (tmp_path / "graded/prediction.json").write_text(json.dumps({"targets": plain}))
    other = write_table(tmp_path / "p.csv", ["case", "predicted", "a", "b"], *rows)
    labels = write_table(tmp_path / "l.csv", ["case", "label"], ["x", "a"], ["y", "b"])
    assert evaluate(graded, labels, other).result["comparison"]["accuracy"]["difference"] == 0


def test_training_cases_are_those_that_the_manifests_name(tmp_path):
    predictions, labels, _, _ = write_tables(tmp_path)
    (tmp_path / "other").mkdir()
    other, _, _, _ = write_tables(tmp_path / "other")
    for folder, case in ((tmp_path, "c5"), (tmp_path / "other", "c2")):
        state = {"settings": {}, "cases": {}, "overwriting": [], "train_cases": [case, "gone"]}
        (folder / "prediction.json").write_text(json.dumps(state))
    evaluation = evaluate(predictions, labels, other)
    assert evaluation.result["train_cases"] == ["c5"]
    assert evaluation.result["compare"]["train_cases"] == ["c2"]
    assert "cases with names of training cases: 1 (c5)" in page_of(evaluation)


def test_errors_of_numbers_are_in_standard_deviations_of_the_truth(tmp_path):
    """Not in those of the training cases, which the manifest holds."""
    predictions = write_table(tmp_path / "p.csv", ["case", "age"], ["x", 30], ["y", 50])
    labels = write_table(tmp_path / "l.csv", ["case", "age"], ["x", 40], ["y", 60])
    targets = RegressionTargets(("age",), means=(0.0,), stds=(1000.0,))
    (tmp_path / "prediction.json").write_text(json.dumps({"targets": targets.plain()}))
    result = evaluate(predictions, labels).result
    assert [row["error"] for row in result["cases"]] == [1.0, 1.0]


def test_a_table_of_image_level_predictions(tmp_path):
    predictions, labels, *_ = image_level_tables.write_tables(tmp_path)
    scores = medconv.evaluate(predictions, labels)
    expected = evaluate_table(predictions, labels).result
    assert scores.mean == expected["mean"] and len(scores.rows) == len(expected["cases"])
    assert scores.rows[0]["case"] == expected["cases"][0]["case"]


def test_the_page_is_self_contained_and_escapes_names(tmp_path):
    predictions, labels, outputs, truth = write_tables(tmp_path)
    (tmp_path / "images").mkdir()
    for number in range(11):
        pixels = np.random.default_rng(number).integers(0, 255, (9, 7, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/c{number}.png")
    (tmp_path / "images/c11.png").write_text("no picture")
    text = page_of(evaluate(predictions, labels))
    assert NASTY not in text and "&lt;img src=x" in text
    assert not re.findall(r"https?://|url\(|<script|<link", text)
    assert text.count("data:image/png;base64,") == 3 + 12 and "without the image: " in text
    errors = CLASSES.errors(outputs, truth)
    assert re.findall(r"<h3>(c\d+) · error", text)[0] == f"c{errors.argmax()}"


def test_the_page_of_grades_shows_the_true_one(tmp_path):
    predictions, labels, *_ = write_tables(tmp_path)
    targets = OrdinalTargets(CLASSES.names).plain()
    (tmp_path / "prediction.json").write_text(json.dumps({"targets": targets}))
    evaluation = evaluate(predictions, labels)
    assert evaluation.result["mean"]["quadratic_kappa"] is not None and "<h3>c" in page_of(evaluation)


def test_beside_label_maps_a_case_without_a_row_is_named_and_not_counted(tmp_path):
    predictions, labels, *_ = write_tables(tmp_path)
    targets = JointTargets(("box",), ((1,),), of_image=CLASSES)
    manifest = {"settings": {}, "cases": {}, "overwriting": [], "targets": targets.plain()}
    (tmp_path / "prediction.json").write_text(json.dumps(manifest))
    lines = labels.read_text().splitlines()
    labels.write_text("\n".join(line for line in lines if "c3.png" not in line))
    result = evaluate(predictions, labels).result
    assert result["without_label"] == ["c3"]
    assert len(result["cases"]) == 11
